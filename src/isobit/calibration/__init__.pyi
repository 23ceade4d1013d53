from isobit.calibration.adapters import gptq_statistics as gptq_statistics
from isobit.calibration.adapters import sparsegpt_statistics as sparsegpt_statistics
from isobit.calibration.adapters import wanda_statistics as wanda_statistics
from isobit.calibration.statistics import ColumnNorms as ColumnNorms
from isobit.calibration.statistics import Hessian as Hessian
from isobit.calibration.statistics import Ranges as Ranges
from isobit.calibration.statistics import inverse_factor as inverse_factor
