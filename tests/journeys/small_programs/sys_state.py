import gc
import signal
import sys
import threading

print(sys.getrecursionlimit(), sys.getswitchinterval(), sys.getfilesystemencoding())
print(sys.gettrace(), sys.getprofile(), sys.excepthook, sys.displayhook, sys.unraisablehook)
print(gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.get_freeze_count(), len(gc.callbacks))
print({s.name: signal.getsignal(s) for s in signal.valid_signals() if isinstance(s, signal.Signals)})
print(threading.active_count(), [t.name for t in threading.enumerate()])
print(sys.stdin, sys.stdout, sys.stderr, sys.stdout.line_buffering, sys.stdout.write_through)
print(sys.dont_write_bytecode, sys.warnoptions, sys._xoptions, sys.pycache_prefix)
print(sys.breakpointhook, sys.__breakpointhook__ is sys.breakpointhook, sys.flags)
print(sys.float_info, sys.int_info, sys.hash_info, sys.get_asyncgen_hooks(), sys.get_coroutine_origin_tracking_depth())
