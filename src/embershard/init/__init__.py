"""What `embershard init` does: look at a data file, decide what each column is, and write the text of a job."""
