"""Model families: the registry (models.py) and the rules that its entries are made of."""
