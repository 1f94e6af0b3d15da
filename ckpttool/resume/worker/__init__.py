"""One rank of a run: builds the model of the recipe, trains, saves or resumes, and records what it observes."""
