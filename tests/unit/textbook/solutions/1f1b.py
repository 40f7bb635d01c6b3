EXERCISE = "1f1b"


def three_stages(stage, micro_batches):
    ahead = min(2 - stage, micro_batches)
    order = [f"F{k}" for k in range(ahead)]
    for k in range(micro_batches):
        if k + ahead < micro_batches:
            order.append(f"F{k + ahead}")
        order.append(f"B{k}")
    return order
