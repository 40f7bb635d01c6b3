"""The Korean of the explanations: English text, and the same in Korean."""

FRAMES = {
    "bytes sent": "보낸 바이트",
    "messages": "메시지",
    "time of all steps: {ms} ms": "모든 단계의 시간: {ms} ms",
    "play": "재생",
    "stop": "정지",
    "Press Enter for the next step.": "다음 단계는 Enter 키를 누르세요.",
    "drawn in {file}": "{file}에 그렸습니다",
    "written to {file}": "{file}에 썼습니다",
    "How distributed training works: {n} topics": "분산 학습의 원리: 주제 {n}개",
    "step {k}": "단계 {k}",
    "step {k}: {event}": "스텝 {k}: {event}",
    "micro-batch {k}: {event}": "마이크로배치 {k}: {event}",
    "end of the step": "스텝 끝",
    "rank {r}": "랭크 {r}",
    "server {r}": "서버 {r}",
    "stage {s}": "스테이지 {s}",
    "chunks": "청크",
    "weights": "가중치",
    "pushed": "보낸 값",
    "scale": "스케일",
    "divided": "나눈 값",
    "saved": "저장",
    "pass": "패스",
    "passes": "통과",
    "conflicts": "충돌",
    "parameters": "파라미터",
    "gradients": "그래디언트",
    "optimizer state": "옵티마이저 상태",
    "time slots": "시간 칸",
    "activations": "활성값",
    "after slot {k}": "칸 {k} 다음",
    "forward of {unit}": "{unit}의 순전파",
    "backward of {unit}": "{unit}의 역전파",
    "gradients complete": "그래디언트 완성",
    "update": "갱신",
}

FORMULAS = {
    "bytes that the busiest rank sends": "가장 바쁜 랭크가 보내는 바이트",
    "bytes of all ranks": "모든 랭크가 보내는 바이트",
    "bytes that the busiest rank sends in a step, control message included": (
        "가장 바쁜 랭크가 한 스텝에 보내는 바이트 (제어 메시지 포함)"
    ),
    "bytes of parameters, gradients and optimizer state on a rank": (
        "한 랭크의 파라미터, 그래디언트, 옵티마이저 상태의 바이트"
    ),
    "bytes of activations and gradients between stages": "스테이지 사이의 활성값과 그래디언트의 바이트",
    "most micro-batches saved on stage 0": "스테이지 0이 저장하는 마이크로배치의 최대 수",
    "idle slots, as a fraction": "쉬는 칸의 비율",
    "updates between a gradient and its use, at most, on stage 0": (
        "스테이지 0에서 그래디언트 계산과 사용 사이의 갱신 수 (최대)"
    ),
    "versions of the weights on stage 0": "스테이지 0의 가중치 버전 수",
}

LEGENDS = {
    "a1 is chunk a of rank 1; a0+a1 is the sum of chunk a of ranks 0 and 1.": (
        "a1은 랭크 1의 청크 a, a0+a1은 랭크 0과 1의 청크 a의 합입니다."
    ),
    "A, B, ... are units of the model. w: initial parameters; g1: gradient of row 1 in step 1, "
    "h1 in step 2; →: on its way; - or empty: not stored.": (
        "A, B, ...는 모델의 유닛입니다. w: 처음 파라미터, g1: 스텝 1에서 행 1의 그래디언트 (스텝 2는 h1), "
        "→: 전송 중, - 또는 빈칸: 저장하지 않음."
    ),
    "F0: forward of micro-batch 0; B: input half of its backward; W: weight half; BW: both; . idle. "
    "F, B and W take a slot each.": (
        "F0: 마이크로배치 0의 순전파, B: 역전파 중 입력 부분, W: 가중치 부분, BW: 둘 다, .: 쉼. "
        "F, B, W는 각각 한 칸이 걸립니다."
    ),
    "F0v1: forward of micro-batch 0, with the weights after 1 update; B: input half of its backward; "
    "W: weight half; BW: both; . idle.": (
        "F0v1: 한 번 갱신된 가중치로 계산한 마이크로배치 0의 순전파, B: 역전파 중 입력 부분, W: 가중치 부분, "
        "BW: 둘 다, .: 쉼."
    ),
}

COLLECTIVES = {
    "Ring all-reduce: the sum of all ranks, in chunks": "링 올리듀스: 모든 랭크의 합을 청크로 나누어",
    "Every rank has a buffer of {n} chunks, and all ranks need the sum.": (
        "모든 랭크는 청크 {n}개의 버퍼를 가지며, 모두 그 합이 필요합니다."
    ),
    "In each step a rank sends one chunk to the next rank, and adds the chunk received.": (
        "단계마다 랭크는 다음 랭크로 청크 하나를 보내고, 받은 청크를 더합니다."
    ),
    "After {half} steps each rank has one chunk of the sum (reduce-scatter).": (
        "{half}단계 뒤에 각 랭크는 합의 청크 하나를 가집니다 (리듀스-스캐터)."
    ),
    "In {half} more steps the sums travel round the ring (all-gather).": (
        "다음 {half}단계에서 합이 링을 돕니다 (올게더)."
    ),
    "No rank sends more than another, and all links work in every step.": (
        "어느 랭크도 다른 랭크보다 많이 보내지 않고, 모든 링크가 매 단계 일합니다."
    ),
    "Star all-reduce: rank 0 adds everything": "스타 올리듀스: 랭크 0이 모두 더합니다",
    "In step 1 all ranks send their buffer to rank 0, which adds them.": (
        "단계 1에서 모든 랭크가 버퍼를 랭크 0으로 보내고, 랭크 0이 더합니다."
    ),
    "In step 2 rank 0 sends the sum to all ranks.": "단계 2에서 랭크 0이 합을 모든 랭크에 보냅니다.",
    "The link of rank 0 carries everything: it sends (n-1) S, a worker only S.": (
        "랭크 0의 링크가 모두 나릅니다. 랭크 0은 (n-1) S를, 워커는 S만 보냅니다."
    ),
}

DATA = {
    "Data parallelism: buckets of gradients, and overlap with the backward": (
        "데이터 병렬: 그래디언트 버킷, 그리고 역전파와의 겹침"
    ),
    "Each of {n} ranks has all parameters and one row of the batch.": (
        "랭크 {n}개는 각각 모든 파라미터와 배치의 행 하나를 가집니다."
    ),
    "The backward goes from the last unit to the first.": "역전파는 마지막 유닛에서 첫 유닛으로 갑니다.",
    "A bucket is a run of units. Its all-reduce starts when its gradients are complete.": (
        "버킷은 이어진 유닛들입니다. 그래디언트가 완성되면 올리듀스가 시작됩니다."
    ),
    "The other units compute their backward meanwhile: this is the overlap.": (
        "그동안 다른 유닛은 역전파를 계산합니다. 이것이 겹침입니다."
    ),
    "All ranks then make the same update, and no parameter is sent.": (
        "그다음 모든 랭크가 같은 갱신을 하며, 파라미터는 보내지 않습니다."
    ),
    "ZeRO stage 1: optimizer state is sharded": "ZeRO 1단계: 옵티마이저 상태를 나눔",
    "Every rank has all parameters and all gradients.": "모든 랭크는 모든 파라미터와 그래디언트를 가집니다.",
    "After a reduce-scatter each rank has the sum of one shard; the rest is a partial sum.": (
        "리듀스-스캐터는 각 랭크에 샤드 하나의 합을 남깁니다. 나머지는 부분합입니다."
    ),
    "A rank has only the optimizer state of its shard, and updates only this shard.": (
        "랭크는 자기 샤드의 옵티마이저 상태만 가지며, 그 샤드만 갱신합니다."
    ),
    "An all-gather sends the updated shards to all ranks.": (
        "올게더가 갱신된 샤드를 모든 랭크에 보냅니다."
    ),
    "ZeRO stage 2: gradients are sharded, too": "ZeRO 2단계: 그래디언트도 나눔",
    "Every rank has all parameters, but only a shard of gradients and optimizer state.": (
        "모든 랭크는 모든 파라미터를 가지지만, 그래디언트와 옵티마이저 상태는 샤드만 가집니다."
    ),
    "The gradient of a bucket is in a full-size buffer only until it is reduce-scattered.": (
        "버킷의 그래디언트는 리듀스-스캐터될 때까지만 전체 크기 버퍼에 있습니다."
    ),
    "Then the rank adds its chunk to its shard, and the next bucket uses the buffer.": (
        "그다음 버퍼는 다음 버킷에 쓰이고, 랭크는 자기 청크를 샤드에 더합니다."
    ),
    "An all-gather sends the updated shards to all ranks, as in stage 1.": (
        "1단계처럼 올게더가 갱신된 샤드를 모든 랭크에 보냅니다."
    ),
    "ZeRO stage 3 (FSDP): parameters are sharded, too": "ZeRO 3단계 (FSDP): 파라미터도 나눔",
    "A rank stores a shard of every unit: parameters, gradients and optimizer state.": (
        "랭크는 모든 유닛의 샤드를 저장합니다: 파라미터, 그래디언트, 옵티마이저 상태."
    ),
    "Just before a unit computes, an all-gather collects its parameters.": (
        "유닛이 계산하기 바로 전에 올게더가 파라미터를 모읍니다."
    ),
    "A later unit uses the buffer again, so at most two units are unsharded at once.": (
        "버퍼는 뒤의 유닛이 다시 쓰므로, 동시에 모인 유닛은 많아야 둘입니다."
    ),
    "After its backward, a reduce-scatter leaves each rank the sum of its shard.": (
        "역전파 뒤에 리듀스-스캐터가 각 랭크에 샤드의 합을 남깁니다."
    ),
    "Gradient accumulation: micro-batches add, and one reduction follows": (
        "그래디언트 누적: 마이크로배치를 더하고 한 번만 리듀스"
    ),
    "Each rank divides its rows into two micro-batches.": (
        "각 랭크는 자기 행을 마이크로배치 둘로 나눕니다."
    ),
    "The first backward overwrites the gradient buffer, the second one adds to it.": (
        "첫 역전파는 그래디언트 버퍼를 덮어쓰고, 둘째는 더합니다."
    ),
    "Only the last micro-batch starts reductions: the bytes sent do not grow.": (
        "마지막 마이크로배치만 리듀스를 시작하므로, 보내는 바이트는 늘지 않습니다."
    ),
}

SERVERS = {
    "Master: rank 0 alone updates": "마스터: 랭크 0만 갱신",
    "Rank 0 reads all rows, and sends each rank its own.": (
        "랭크 0이 모든 행을 읽고, 각 랭크에 그 몫을 보냅니다."
    ),
    "Gradients go up a tree to rank 0, which updates.": (
        "그래디언트는 트리를 따라 랭크 0으로 올라가고, 랭크 0이 갱신합니다."
    ),
    "Parameters come down the same tree before the next step.": (
        "파라미터는 다음 스텝 전에 같은 트리를 따라 내려옵니다."
    ),
    "Only rank 0 has optimizer state, and its links carry the most.": (
        "랭크 0만 옵티마이저 상태를 가지며, 그 링크가 가장 많이 나릅니다."
    ),
    "Parameter server, synchronous: workers push gradients and pull parameters": (
        "동기 파라미터 서버: 워커가 그래디언트를 밀고 파라미터를 당김"
    ),
    "The last rank is a server: it has the parameters and computes no rows.": (
        "마지막 랭크가 서버입니다. 파라미터를 가지며 행은 계산하지 않습니다."
    ),
    "Each of {w} workers pushes the gradient of a unit as soon as it is complete.": (
        "워커 {w}개는 유닛의 그래디언트가 완성되는 대로 보냅니다."
    ),
    "The server waits for all workers, adds in the order of ranks, and updates.": (
        "서버는 모든 워커를 기다려 랭크 순서로 더하고 갱신합니다."
    ),
    "It sends the new parameters to all workers: W S bytes through one link.": (
        "새 파라미터를 모든 워커에 보냅니다: 링크 하나로 W S 바이트."
    ),
    "Local SGD: workers update alone, and average every second step": (
        "로컬 SGD: 워커가 따로 갱신하고 두 스텝마다 평균"
    ),
    "Each worker updates its own parameters with its own gradient.": (
        "각 워커는 자기 그래디언트로 자기 파라미터를 갱신합니다."
    ),
    "After two steps an all-reduce averages the parameters of all workers.": (
        "두 스텝 뒤에 올리듀스가 모든 워커의 파라미터를 평균합니다."
    ),
    "Between averages no message is sent, but the workers drift apart.": (
        "그 사이에는 메시지가 없지만, 워커들은 서로 멀어집니다."
    ),
    "Gossip: each worker averages with one neighbour after each step": (
        "가십: 스텝마다 이웃 하나와 평균"
    ),
    "Each worker updates alone, then takes the mean with one other worker.": (
        "각 워커는 따로 갱신한 뒤 다른 워커 하나와 평균을 냅니다."
    ),
    "The neighbour is at distance 1, 2, 4, ... in turn, so news reaches all in lg n steps.": (
        "이웃의 거리는 차례로 1, 2, 4, ...이므로 소식은 lg n 스텝에 퍼집니다."
    ),
    "At the end of the run an all-reduce takes the average of all workers.": (
        "실행이 끝나면 올리듀스가 모든 워커의 평균을 냅니다."
    ),
}

PIPELINES = {
    "GPipe: all forwards, then all backwards": "GPipe: 모든 순전파 다음에 모든 역전파",
    "The model is cut into {p} stages, the batch into {m} micro-batches.": (
        "모델은 스테이지 {p}개로, 배치는 마이크로배치 {m}개로 나뉩니다."
    ),
    "A stage sends activations to the next stage, and gradients to the one before.": (
        "스테이지는 활성값을 다음 스테이지로, 그래디언트를 앞 스테이지로 보냅니다."
    ),
    "All micro-batches go forward before the first one goes back.": (
        "모든 마이크로배치의 순전파가 끝난 뒤 첫 역전파가 시작됩니다."
    ),
    "So a stage saves the activations of all {m} micro-batches.": (
        "그래서 스테이지는 마이크로배치 {m}개 모두의 활성값을 저장합니다."
    ),
    "Stages wait at both ends of a step: this is the bubble.": (
        "스텝의 양 끝에서 스테이지가 기다립니다. 이것이 버블입니다."
    ),
    "1F1B: one forward, one backward": "1F1B: 순전파 하나, 역전파 하나",
    "A stage runs a backward as soon as one is ready, before the next forward.": (
        "스테이지는 역전파가 준비되면 다음 순전파보다 먼저 실행합니다."
    ),
    "So it saves at most p micro-batches, however many a step has.": (
        "그래서 마이크로배치가 아무리 많아도 p개까지만 저장합니다."
    ),
    "With whole backwards the bubble equals GPipe's. Here a backward has two halves, B and W.": (
        "버블은 GPipe와 같습니다. 여기서는 역전파를 B와 W로 나눕니다."
    ),
    "B comes first, since another stage waits for its result. This shortens the bubble.": (
        "다른 스테이지가 B의 결과를 기다리므로 B가 먼저이고, 버블이 줄어듭니다."
    ),
    "Zero bubble (ZB-H1): weight halves fill the bubble": "제로 버블 (ZB-H1): 가중치 부분이 버블을 채움",
    "No other stage waits for a weight half W, so W can come later.": (
        "가중치 부분 W는 아무 스테이지도 기다리지 않으므로 늦출 수 있습니다."
    ),
    "ZB-H1 delays W of 1F1B to slots that would be idle at the end.": (
        "ZB-H1은 1F1B의 W를 끝에서 쉬게 될 칸으로 미룹니다."
    ),
    "A stage saves no more micro-batches than p.": "스테이지는 마이크로배치를 p개까지만 저장합니다.",
    "Asynchronous pipeline (PipeDream): no bubble between steps": (
        "비동기 파이프라인 (PipeDream): 스텝 사이에 버블 없음"
    ),
    "A stage updates after every micro-batch, and never waits for a step to end.": (
        "스테이지는 마이크로배치마다 갱신하며, 스텝의 끝을 기다리지 않습니다."
    ),
    "A backward must use the weights of its forward: older versions are saved.": (
        "역전파는 순전파 때의 가중치를 써야 하므로 옛 버전을 저장합니다."
    ),
    "Stage 0 has p versions, and its gradients are up to p-1 updates late.": (
        "스테이지 0은 버전 p개를 가지며, 그래디언트는 최대 p-1 갱신만큼 늦습니다."
    ),
    "Idle slots are only at the start and at the end of training.": (
        "쉬는 칸은 학습의 처음과 끝에만 있습니다."
    ),
}

TENSORS = {
    "Column-parallel linear layer: outputs are divided": "열 병렬 선형층: 출력을 나눔",
    "Row-parallel linear layer: inputs are divided": "행 병렬 선형층: 입력을 나눔",
    "A linear layer computes y = x W^T. Here the outputs are divided among {n} ranks.": (
        "선형층은 y = x W^T를 계산합니다. 여기서는 출력을 랭크 {n}개로 나눕니다."
    ),
    "Every rank has all of x, and computes its own columns of y: no message forward.": (
        "모든 랭크가 x 전체를 가지고 y의 자기 열을 계산하므로, 순전파에는 메시지가 없습니다."
    ),
    "In the backward each rank has only a summand of dx, since it has some outputs.": (
        "역전파에서 각 랭크는 출력 일부만 있으므로 dx의 한 항만 가집니다."
    ),
    "An all-reduce adds the summands, so every rank has dx.": (
        "올리듀스가 항들을 더해 모든 랭크가 dx를 가집니다."
    ),
    "A linear layer computes y = x W^T. Here the inputs are divided among {n} ranks.": (
        "선형층은 y = x W^T를 계산합니다. 여기서는 입력을 랭크 {n}개로 나눕니다."
    ),
    "Each rank has some columns of x, and so computes only a summand of y.": (
        "각 랭크는 x의 열 일부만 있으므로 y의 한 항만 계산합니다."
    ),
    "An all-reduce adds the summands, so every rank has y.": (
        "올리듀스가 항들을 더해 모든 랭크가 y를 가집니다."
    ),
    "The backward needs no message: dy is on every rank, dx_r = dy W_r.": (
        "역전파에는 메시지가 없습니다: dy가 모든 랭크에 있고 dx_r = dy W_r입니다."
    ),
    "After a column-parallel layer, x is divided in this way: one all-reduce for both.": (
        "열 병렬 층 다음의 x가 바로 이렇게 나뉘므로, 둘에 올리듀스 한 번이면 됩니다."
    ),
    "x0+2x1 under y0: that column of y is this sum of features; d0 is a symbol of dy. W: numbers of a row or "
    "column of the weight. - or empty: not on this rank, or not yet.": (
        "y0 아래의 x0+2x1: y의 그 열은 이 특징들의 합입니다. d0은 dy의 기호입니다. W: 가중치의 행이나 열의 수. "
        "- 또는 빈칸: 이 랭크에 없거나 아직 없음."
    ),
    "input x": "입력 x",
    "rows of W": "W의 행",
    "columns of W": "W의 열",
    "output y": "출력 y",
    "gradient dy": "그래디언트 dy",
    "gradient dx": "그래디언트 dx",
    "bytes that a rank sends, forward and backward": "한 랭크가 순전파와 역전파에서 보내는 바이트",
    "forward: a summand of y on each rank": "순전파: 각 랭크에 y의 한 항",
    "forward: y": "순전파: y",
    "the gradient of y arrives": "y의 그래디언트가 도착",
    "backward: a summand of dx on each rank": "역전파: 각 랭크에 dx의 한 항",
    "backward: dx": "역전파: dx",
}

ASYNC_SERVERS = {
    "Parameter server, asynchronous: gradients are applied as they come": (
        "비동기 파라미터 서버: 그래디언트가 오는 대로 갱신"
    ),
    "The server updates with each gradient at once, and waits for no other.": (
        "서버는 그래디언트마다 바로 갱신하며, 다른 것을 기다리지 않습니다."
    ),
    "A worker pulls, computes, and pushes. Then it takes its next rows (a ticket).": (
        "워커는 당기고, 계산하고, 밉니다. 그다음 새 티켓을 받습니다."
    ),
    "The last worker takes {slow} times as long here, so others overtake it.": (
        "여기서 마지막 워커는 {slow}배 오래 걸려, 다른 워커가 앞지릅니다."
    ),
    "Its gradient is from old weights. The staleness is the number of updates since its pull.": (
        "그 그래디언트는 옛 가중치의 것으로, 당긴 뒤의 갱신 수만큼 뒤처집니다."
    ),
    "w: initial parameters; g1: gradient of row 1 in step 1, h1 in step 2. Workers: the weights "
    "that they compute with; server: after the update.": (
        "w: 처음 파라미터, g1: 스텝 1에서 행 1의 그래디언트 (스텝 2는 h1). 워커: 계산에 쓰는 가중치, "
        "서버: 갱신 뒤."
    ),
    "buffers": "버퍼",
    "worker {r} pushes; {s} other updates since its pull": "워커 {r}이 밂; 당긴 뒤 다른 갱신 {s}번",
    "largest staleness, in updates": "가장 큰 뒤처짐 (갱신 수)",
    "updates": "갱신 수",
}

MEMORY = {
    "Recomputation: activations are freed, and computed again": "재계산: 활성값을 버리고 다시 계산",
    "The backward of a unit needs the activations that its forward saved.": (
        "유닛의 역전파에는 순전파가 저장한 활성값이 필요합니다."
    ),
    "With recomputation a segment of k units saves only its input.": (
        "재계산에서는 유닛 k개의 구간이 입력만 저장합니다."
    ),
    "Its backward first runs the forwards of the segment again.": (
        "역전파는 먼저 그 구간의 순전파를 다시 합니다."
    ),
    "The last unit is left out, because its backward follows at once.": (
        "마지막 유닛은 역전파가 바로 이어지므로 빠집니다."
    ),
    "Memory falls, and up to a third more is computed: B takes twice the time of F.": (
        "메모리는 줄고 계산은 최대 3분의 1 늘어납니다: B는 F의 두 배 걸립니다."
    ),
    "A.x: input of unit A; A.h: its inner activation; x0: alive; - or empty: freed or not yet made. F, B: passes.": (
        "A.x: 유닛 A의 입력, A.h: 내부 활성값, x0: 살아 있음, - 또는 빈칸: 버렸거나 아직 없음. F, B: 순전파, 역전파."
    ),
    "recompute {way}": "재계산 {way}",
    "now": "지금",
    "after pass {k}": "패스 {k} 다음",
    "most activations alive, memory.recompute {way}": "살아 있는 활성값의 최대 수, memory.recompute {way}",
    "forwards of units with recomputation": "재계산할 때 유닛의 순전파 수",
    "Loss scaling: small gradients survive float16": "손실 스케일링: 작은 그래디언트를 float16에서 지킴",
    "float16 has no number between 0 and {least:.2g}: small gradients become 0.": (
        "float16에는 0과 {least:.2g} 사이의 수가 없어 작은 그래디언트는 0이 됩니다."
    ),
    "The loss is multiplied by a scale, and so are all gradients.": (
        "손실에 스케일을 곱하면 모든 그래디언트에도 곱해집니다."
    ),
    "In float32 the update divides by the scale: the small gradients are there.": (
        "갱신은 float32에서 스케일로 나눕니다: 작은 그래디언트가 남아 있습니다."
    ),
    "Above {most:.0f} a gradient is infinite: the step is skipped, the scale halves.": (
        "{most:.0f}보다 크면 그래디언트는 무한대가 되어, 스텝을 건너뛰고 스케일을 반으로 줄입니다."
    ),
    "After {good} steps without overflow the scale doubles.": (
        "오버플로 없이 {good}스텝이 지나면 스케일은 두 배가 됩니다."
    ),
    "float16: the gradient as the backward computes it; divided: as the update reads it.": (
        "float16: 역전파가 계산한 그래디언트, 나눈 값: 갱신이 읽는 값."
    ),
    "gradient {g:g}": "그래디언트 {g:g}",
    "without a scale": "스케일 없이",
    "with the scale": "스케일과 함께",
    "step {k}: the update": "스텝 {k}: 갱신",
    "step {k}: an overflow, no update, half the scale": "스텝 {k}: 오버플로, 갱신 없음, 스케일 절반",
    "skipped steps": "건너뛴 스텝",
    "gradients that are 0 without the scale": "스케일 없이 0이 되는 그래디언트",
}

LADDER = {
    "naive": "단순",
    "coalesced": "병합 접근",
    "shared tiles": "공유 메모리 타일",
    "register tiles": "레지스터 타일",
    "tensor cores": "텐서 코어",
    "Tiling: a matrix product reads global memory less with each rung of a ladder": (
        "타일링: 사다리를 오를 때마다 행렬 곱이 전역 메모리를 덜 읽음"
    ),
    "a block: its tile of C, and the operands it reads": "블록: C의 타일과 읽는 피연산자",
    "reads of each element": "원소마다 읽는 횟수",
    "sectors of 32 bytes": "32바이트 섹터",
    "shared memory": "공유 메모리",
    "left out without g++ or zig: {names}": "g++나 zig가 없어 빠짐: {names}",
    "rung {k}: {rung}": "{k}단: {rung}",
    "sectors of A and B, {rung}": "A와 B의 섹터 수, {rung}",
    "A warp of 32 threads reads global memory in sectors of 32 bytes.": (
        "스레드 32개의 워프는 전역 메모리를 32바이트 섹터로 읽습니다."
    ),
    "Naive: 32 threads read a column of A, so each word needs its own sector.": (
        "단순: 스레드 32개가 A의 한 열을 읽어 워드마다 섹터 하나를 가져옵니다."
    ),
    "Coalesced: they read neighbours in B, so every byte of a sector is used.": (
        "병합 접근: B의 이웃을 읽으므로 섹터의 모든 바이트를 씁니다."
    ),
    "Shared tiles: a block loads a tile once, and its threads share each element.": (
        "공유 메모리 타일: 블록이 타일을 한 번 읽고 스레드들이 각 원소를 함께 씁니다."
    ),
    "Register tiles: a thread computes 16 elements, so a tile is four times as wide and high.": (
        "레지스터 타일: 스레드가 원소 16개를 계산하므로 타일의 변이 네 배입니다."
    ),
    "Tensor cores: 16-bit elements need half the sectors, and a warp multiplies fragments.": (
        "텐서 코어: 16비트 원소는 섹터가 절반이고, 워프가 조각끼리 곱합니다."
    ),
    "C = A B with M, N, K = {m}, {n}, {k}. Sectors are those of all requests, without caches. "
    "Passes are over the 32 banks; conflicts are passes added by equal banks.": (
        "C = A B, M, N, K = {m}, {n}, {k}. 섹터: 캐시 없이 모든 요청의 합. "
        "통과: 뱅크 32개를 지나는 횟수; 충돌: 같은 뱅크 때문에 늘어난 횟수."
    ),
}

EXPLAIN: dict[str, str] = {
    **FRAMES,
    **FORMULAS,
    **LEGENDS,
    **COLLECTIVES,
    **DATA,
    **SERVERS,
    **PIPELINES,
    **TENSORS,
    **ASYNC_SERVERS,
    **MEMORY,
    **LADDER,
}
