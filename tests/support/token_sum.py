"""A TRL reward that random weights can earn: it differs from sample to sample."""


def token_sum(prompts, completions, completion_ids, **columns):
    return [sum(ids) % 7 / 7 for ids in completion_ids]
