EXERCISE = "server"


def parameter_server(rank, workers, servers, count):
    def cut(k):
        return count * k * (k + 1) // (servers * (servers + 1))

    if rank < servers:
        mine = [(w, cut(rank), cut(rank + 1)) for w in range(servers, servers + workers)]
        return [([], mine, True), (mine, [], False)]
    every = [(k, cut(k), cut(k + 1)) for k in range(servers)]
    return [(every, [], False), ([], every, False)]
