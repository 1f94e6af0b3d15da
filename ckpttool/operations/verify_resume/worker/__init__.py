"""One rank of a run: builds what the recipe says, trains, saves or resumes, and writes down what it sees."""
