"""From finished trials to tables, plots and statistics; reads files alone and can be done again at any time."""
