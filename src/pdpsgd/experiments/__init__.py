"""The paper's tables and figures, and our own beside them: settings as plain data, a runner, records, pages.

| file | one idea |
|---|---|
| `settings` | one training run, as plain data |
| `studies` | which runs a table or figure consists of |
| `systems` | the plan of a run, also for the two simple systems that are no mechanism |
| `runner` | carries out a run |
| `record` | what came out, one JSON line a run; nothing is computed twice |
| `published` | what others printed |
| `tables`, `figures` | pages made from records |
"""
