"""`exitwave serve`: an HTTP API and pages over all data sets and runs below one folder.

    ROOT/<run>/            a pipeline's run or a campaign's data set, as the verbs make them
    ROOT/<run>.yaml        the configuration that was submitted for it
    ROOT/.exitwave/        the service's own: token, jobs/<id>/{job.json, lock, exit.json, stop, log}

The service holds no truth of its own about a run: it reads what the verbs leave on disk, and starts the same verbs as
processes of their own, which outlive it. So a service that is killed comes back with the same truth, finds what still
runs by the lock that it holds, and starts again what died.

Read on: `catalogue` (what is there), `jobs` and `job` (processes), `live` (what changes), `access` and `limits` (who
may, and how much), `api` and `pages` (what is shown).
"""
