# shell: $RUN broken_pipe_at_exit.py | true; echo codes ${PIPESTATUS[@]}
import time

time.sleep(0.5)
for i in range(3):
    print("line", i)
