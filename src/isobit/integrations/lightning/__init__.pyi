from isobit.integrations.lightning.watch_callback import WatchCallback as WatchCallback
