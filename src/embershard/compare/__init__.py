"""Run `embershard compare`: train one job in several arms, judge the runs and report which arms paid."""
