"""The panel: one sampler of shards and of a run's log, shown as a page in the browser or in the terminal."""
