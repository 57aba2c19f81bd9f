"""The bridge to transformers: models whose experts are divided over ranks. Imported only when it is used."""
