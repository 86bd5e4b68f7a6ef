"""Tools around holdall's memories: probe, plan, lint, watch, bench, report, demo, imports and exports."""
