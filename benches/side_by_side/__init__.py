"""What benches/peers.py is made of: cases, contenders, clocks, ceilings, answers, and the report that is written."""
