"""The package that is installed: its folders lie at the top of the repository and are linked from here."""
