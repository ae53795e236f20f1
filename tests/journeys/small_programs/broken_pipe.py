# shell: set -o pipefail; $RUN broken_pipe.py | head -2; echo codes ${PIPESTATUS[@]}
for i in range(100000):
    print("line", i)
