import atexit
import sys


@atexit.register
def look():
    print(sys.last_type, sys.last_value, sys.last_traceback.tb_frame.f_code.co_name, sys.last_traceback.tb_next)


for i in range(3):
    raise ValueError(i)
