from isobit.integrations import transformers as transformers
