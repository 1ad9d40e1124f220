"""Makes a table for the replays from what `flashtune --json tune --exhaustive` printed: python3 shrink.py FILE > NAME.json"""

import json
import sys

report = json.load(open(sys.argv[1]))
(tuned,) = report["tuned"]
key = tuned["record"]["key"]
rows = [[t["parameters"], round(t["median_us"], 2) if t["result"] == "timed" else None] for t in tuned["trials"]]
table = {"device": key["device"], "problem": key["problem"], "shape": tuned["record"]["provenance"]["shape"]}
head = json.dumps(table)[:-1]
print(head + ', "trials": [\n' + ",\n".join(json.dumps(r, separators=(",", ":")) for r in rows) + "\n]}")
