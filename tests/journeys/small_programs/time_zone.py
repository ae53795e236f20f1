# env: TZ=Asia/Kolkata
import datetime
import time

print(time.tzname, time.timezone, datetime.datetime.fromtimestamp(0))
for zone in ("UTC", "America/New_York"):
    import os

    os.environ["TZ"] = zone
    time.tzset()
    print(time.tzname, datetime.datetime.fromtimestamp(0), time.strftime("%Z", time.localtime(0)))
