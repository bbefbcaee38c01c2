"""The network and the run: a mixture-of-experts model whose dispatch and combine are measured."""
