"""The HTTP server. It does not import torch.

`lifecycle.serve` runs the application of `app.create_app` on a socket of `transport.listen.bind`. A request passes the
folders in this order, and a module imports only from its own folder and from those before it:

    settings, error_responses, ipc, service_manager
    transport        sockets, TLS, limits, HTTP
    observability    metrics, logs and traces of each request
    access           host and origin checks, API keys
    queueing         admission queue in front of each engine, deadlines
    models           the registry: which engine answers a name
    state            what all requests share; config_file: all of it from one file
    request          decode, render, submit, collect, stream: common to all APIs
    apis             openai, anthropic, ollama, tgi, openapi, health, metrics
    app              the routes of all APIs as one application
    admin            the admin listener
    lifecycle        start, signals, shutdown
"""
