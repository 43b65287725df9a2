"""A callback of our own: it is told how a run goes, in the worker that reports."""


class History:
    """Write a line per evaluation into a CSV file."""

    def __init__(self, path):
        self.path = path

    def started(self, plan):
        """`plan` and what the other methods get are described in worker/reporting/records.py."""
        self.split = plan.split
        self.file = open(self.path, "w")

    def evaluated(self, evaluation):
        """Write the figures of one evaluation as a line."""
        figures = evaluation.figures[self.split]
        self.file.write(f"{evaluation.step},{','.join(f'{value:.6g}' for value in figures.values())}\n")
        self.file.flush()

    def close(self):
        """Close the file; it is called however the run ends."""
        if hasattr(self, "file"):
            self.file.close()
