"""`python -m octavo.entrypoints.openai.api_server --model M` is `octavo serve M`."""
