"""What a GPU gives, beside what it could give: see __main__."""
