"""The paper's tables and figures, and our own beside them: settings as plain data, a runner, records, pages.

| file | one idea |
|---|---|
| `settings` | one training run, as plain data |
| `studies` | which runs a table or figure consists of |
| `systems` | the plan of a run, also for the two simple systems that are no mechanism |
| `readings` | the same by other readings of the paper |
| `search` | the hyper-parameter search that every system is given |
| `inputs`, `runner` | data and model of a run; carries it out |
| `kept_features` | features of benchmarks, kept in the user's cache folder |
| `effort` | what a run would take, without running it whole |
| `record` | what came out, one JSON line a run; nothing is computed twice |
| `published` | what others printed |
| `cells`, `pages`, `tables`, `figures`, `figures_page`, `overview` | pages made from records |
| `idp_page` | the page on IDP-SGD's own benchmark |
| `as_published_page`, `reasons` | the page of table 1 as published, and why its figures are not the printed ones |
| `many_records` | how many records of a person should take part: mails by senders, a study of its own |
| `advice`, `advice_sets`, `advice_start` | the runs behind `pdpsgd advise`, and their public sets |
| `probabilities` | what makes probabilities better: averaged weights, and calibration with and without other people |
| `table_3` | Individualized PATE beside `pdp-sgd-exact`, with linear models |
| `table_3_networks` | the same with the paper's CNNs |
| `table_3_published` | its votes by the published accounting, and what that leaves out |
| `filters` | individual filters beside `pdp-sgd-exact`, at equal compute |
| `least_squares` | personal least squares, with nothing tuned |
| `fairness` | by tier and class where strictness goes with a class, and what remedies cost |
| `random_processes` | first weights from generated images, tried for Fashion-MNIST |
| `fashion` | what was tried for Fashion-MNIST, told from the trials |
| `texts` | a frozen text encoder or adapters, on the same mails, at several epsilons |
| `mail_embeddings` | features of the mails, for `many_records` |
| `reproduce` | one command for each table and figure |
"""
