"""Expert parallelism for transformers models; imported only on use."""
