"""Makes a table for the replays from what `flashtune --json tune --exhaustive` printed:
python3 shrink.py FILE > NAME.json

Schedules that the time was not enough for say nothing and are left out; those that failed are kept without a time.
Fields that came later are left out where they say nothing.
"""

import json
import sys

LATER = ("trim", "output_apart", "bias_stages", "producer_spare", "ending", "quick")


def short(parameters):
    return {f: {k: v for k, v in fields.items() if v or k not in LATER} for f, fields in parameters.items()}


report = json.load(open(sys.argv[1]))
(tuned,) = report["tuned"]
key = tuned["record"]["key"]
known = [t for t in tuned["trials"] if t.get("stage") != "budget"]
rows = [[short(t["parameters"]), round(t["median_us"], 2) if t["result"] == "timed" else None] for t in known]
table = {"device": key["device"], "problem": key["problem"], "shape": tuned["record"]["provenance"]["shape"]}
head = json.dumps(table)[:-1]
print(head + ', "trials": [\n' + ",\n".join(json.dumps(r, separators=(",", ":")) for r in rows) + "\n]}")
