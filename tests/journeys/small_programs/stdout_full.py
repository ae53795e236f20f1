# shell: $RUN stdout_full.py > /dev/full; echo code $?
for i in range(3):
    print("line", i)
