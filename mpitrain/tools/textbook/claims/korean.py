"""The Korean of the claims: sentences, measures, settings, and labels of numbers."""

SENTENCES = {
    "With a ring the busiest rank sends fewer bytes than with a central server.": (
        "링에서는 가장 바쁜 랭크가 보내는 바이트가 중앙 서버를 쓸 때보다 적다."
    ),
    "In a ring all-reduce each rank sends 2 (n - 1) / n of the array.": (
        "링 all-reduce에서 각 랭크는 배열의 2 (n - 1) / n배를 보낸다."
    ),
    "The bytes that the busiest rank sends do not double from 2 to 8 ranks.": (
        "랭크가 2개에서 8개로 늘어도 가장 바쁜 랭크가 보내는 바이트는 두 배가 되지 않는다."
    ),
    "An all-reduce costs as many bytes as a reduce-scatter and an all-gather.": (
        "all-reduce의 바이트는 reduce-scatter와 all-gather를 더한 것과 같다."
    ),
    "For short messages a tree is faster than a ring.": "짧은 메시지에서는 트리가 링보다 빠르다.",
    "Gradients of 8 bits need a quarter of the bytes of float32.": "8비트 기울기는 float32의 4분의 1만큼의 바이트로 충분하다.",
    "The more workers, the more asynchronous updates gain.": "워커가 많을수록 비동기 갱신의 이득이 크다.",
    "Without a common step, gradients are stale.": "공통 단계가 없으면 기울기가 낡는다.",
    "A staleness bound of 1 lets no worker run more than 1 step ahead.": "지연 한계가 1이면 워커는 1단계 넘게 앞서지 못한다.",
    "With two servers the busiest rank sends half as many bytes.": (
        "서버가 둘이면 가장 바쁜 랭크가 보내는 바이트는 절반이 된다."
    ),
    "Local SGD with a period of 10 sends a tenth of the bytes.": "주기가 10인 로컬 SGD는 10분의 1의 바이트를 보낸다.",
    "The bytes that a rank sends in gossip do not grow with the ranks.": (
        "가십에서 한 랭크가 보내는 바이트는 랭크 수와 함께 늘지 않는다."
    ),
    "The more micro-batches, the more idle time.": "마이크로배치가 많을수록 유휴 시간이 길다.",
    "The fewer stages, the more idle time.": "스테이지가 적을수록 유휴 시간이 길다.",
    "Asynchronous pipelines save memory.": "비동기 파이프라인은 메모리를 절약한다.",
    "GPipe's bubble is (p - 1) / (m + p - 1).": "GPipe의 버블은 (p - 1) / (m + p - 1)이다.",
    "1F1B has the same bubble as GPipe.": "1F1B의 버블은 GPipe와 같다.",
    "1F1B saves the activations of at most p micro-batches.": "1F1B는 많아야 p개 마이크로배치의 활성값을 저장한다.",
    "With v chunks on each stage the bubble is v times smaller.": "스테이지마다 청크가 v개이면 버블은 v배 작아진다.",
    "ZB-H1 has a third of GPipe's bubble.": "ZB-H1의 버블은 GPipe의 3분의 1이다.",
    "ZB-H1 saves no more micro-batches than 1F1B.": "ZB-H1은 1F1B보다 많은 마이크로배치를 저장하지 않는다.",
    "In an asynchronous pipeline the first stage's gradients are p - 1 updates late.": (
        "비동기 파이프라인에서 첫 스테이지의 기울기는 갱신 p - 1번만큼 늦다."
    ),
    "ZeRO stages 1 and 2 send no more bytes than plain data parallelism.": (
        "ZeRO 1단계와 2단계는 일반 데이터 병렬보다 많은 바이트를 보내지 않는다."
    ),
    "ZeRO stage 3 sends 1.5 times the bytes of plain data parallelism.": (
        "ZeRO 3단계는 일반 데이터 병렬의 1.5배 바이트를 보낸다."
    ),
    "ZeRO stage 3 divides the memory of the training state by the number of ranks.": (
        "ZeRO 3단계는 학습 상태의 메모리를 랭크 수로 나눈다."
    ),
    "Adam's state needs twice the memory of the parameters.": "Adam의 상태는 매개변수의 두 배의 메모리가 필요하다.",
    "Tensor parallelism needs the bytes of 4 all-reduces for each transformer block.": (
        "텐서 병렬은 트랜스포머 블록마다 all-reduce 4번의 바이트가 필요하다."
    ),
    "Sequence parallelism sends no more bytes than tensor parallelism.": (
        "시퀀스 병렬은 텐서 병렬보다 많은 바이트를 보내지 않는다."
    ),
    "Tensor parallelism sends more bytes than data parallelism.": "텐서 병렬은 데이터 병렬보다 많은 바이트를 보낸다.",
    "Recomputation costs a third more computation.": "재계산은 계산을 3분의 1만큼 늘린다.",
    "Recomputation halves the memory of activations, or better.": "재계산은 활성값의 메모리를 절반 이하로 줄인다.",
    "With tiled attention, memory grows only linearly with the sequence.": (
        "타일 어텐션에서 메모리는 시퀀스 길이에 비례해서만 늘어난다."
    ),
    "Mixed precision may cost memory.": "혼합 정밀도는 메모리를 더 쓸 수 있다.",
    "A training step takes 6 FLOP for each parameter and token.": "학습 한 단계는 매개변수와 토큰마다 6 FLOP이 든다.",
    "Accumulation over m micro-batches divides the memory of activations by m.": (
        "마이크로배치 m개에 걸친 누적은 활성값의 메모리를 m으로 나눈다."
    ),
    "Ranks and micro-batches change nothing: training equals one large batch.": (
        "랭크와 마이크로배치는 결과를 바꾸지 않는다. 학습은 큰 배치 하나와 같다."
    ),
    "With k times the batch and k times the learning rate, as many rows train as well.": (
        "배치와 학습률이 k배이면 같은 수의 행으로 똑같이 잘 학습한다."
    ),
    "Half-precision gradients underflow without a loss scale.": "손실 배율이 없으면 반정밀도 기울기가 언더플로된다.",
    "Reading ahead hides the time of reading.": "미리 읽기는 읽는 시간을 숨긴다.",
}

MEASURES = {
    "bytes of the ring / bytes of the server": "링의 바이트 / 서버의 바이트",
    "difference from the formula, relative": "공식과의 상대 차이",
    "bytes on 8 ranks / bytes on 2 ranks": "랭크 8개의 바이트 / 2개의 바이트",
    "difference of the bytes, relative": "바이트의 상대 차이",
    "time of the tree / time of the ring, links of 1 ms and 200 Mbit/s": "트리의 시간 / 링의 시간, 링크 1 ms와 200 Mbit/s",
    "bytes with int8 / bytes with float32": "int8의 바이트 / float32의 바이트",
    "gain with 6 workers / with 2": "워커 6개의 이득 / 2개의 이득",
    "updates between pull and push, at most": "가져오기와 보내기 사이의 최대 갱신 수",
    "steps ahead of the slowest worker, at most": "가장 느린 워커보다 앞선 최대 단계 수",
    "bytes with 2 servers / with 1, times 2": "서버 2개의 바이트 / 1개의 바이트, 2배",
    "difference from a tenth, relative": "10분의 1과의 상대 차이",
    "bytes on 6 ranks / on 2": "랭크 6개의 바이트 / 2개의 바이트",
    "idle time with 64 micro-batches / with 2": "마이크로배치 64개의 유휴 시간 / 2개의 유휴 시간",
    "idle time of few stages / of many": "적은 스테이지의 유휴 시간 / 많은 스테이지의 유휴 시간",
    "memory of PipeDream / of the synchronous schedule": "PipeDream의 메모리 / 동기 스케줄의 메모리",
    "difference from the formula": "공식과의 차이",
    "difference of the idle fractions": "유휴 비율의 차이",
    "micro-batches that the first of 4 stages saves": "4개 중 첫 스테이지가 저장하는 마이크로배치",
    "difference from one chunk's bubble / v, relative": "청크 하나의 버블 / v와의 상대 차이",
    "idle time of ZB-H1 / of GPipe": "ZB-H1의 유휴 시간 / GPipe의 유휴 시간",
    "micro-batches saved by ZB-H1 / by 1F1B": "ZB-H1이 저장하는 마이크로배치 / 1F1B",
    "difference from p - 1, in updates": "p - 1과의 차이, 갱신 수",
    "bytes with ZeRO / without": "ZeRO의 바이트 / ZeRO 없는 바이트",
    "difference from 1.5 times, relative": "1.5배와의 상대 차이",
    "memory with ZeRO on 4 ranks / without, times 4": "랭크 4개에서 ZeRO의 메모리 / 없을 때, 4배",
    "difference from 2 times the parameters": "매개변수의 2배와의 차이",
    "all-reduces that a block adds to a step": "블록 하나가 단계에 더하는 all-reduce 수",
    "bytes of tensor parallelism / of data parallelism": "텐서 병렬의 바이트 / 데이터 병렬의 바이트",
    "difference from a third": "3분의 1과의 차이",
    "activations with recomputation / without": "재계산의 활성값 / 재계산 없는 활성값",
    "activations of 1024 tokens / of 512": "토큰 1024개의 활성값 / 512개의 활성값",
    "memory with bfloat16 / with float32": "bfloat16의 메모리 / float32의 메모리",
    "difference from the rule, relative": "규칙과의 상대 차이",
    "activations of 16 micro-batches / of 2, times 8": "마이크로배치 16개의 활성값 / 2개의 활성값, 8배",
    "largest difference of a loss, relative": "손실의 최대 상대 차이",
    "validation loss with larger batches / with batches of 8": "큰 배치의 검증 손실 / 배치 8의 검증 손실",
    "fraction of gradient elements that lose their bits": "비트를 잃는 기울기 원소의 비율",
    "time with reading ahead / in turn": "미리 읽는 시간 / 차례로 읽는 시간",
}

SETTINGS = {
    "{ranks} ranks": "랭크 {ranks}개",
    "{ranks} ranks, {elements} elements": "랭크 {ranks}개, 원소 {elements}개",
    "algorithm {algorithm}": "알고리즘 {algorithm}",
    "{algorithm}, {ranks} ranks": "{algorithm}, 랭크 {ranks}개",
    "{ranks} ranks, {nbytes} bytes": "랭크 {ranks}개, {nbytes}바이트",
    "model of width {width}": "너비 {width}인 모델",
    "random delays: {delay}": "무작위 지연: {delay}",
    "every step of every rank is late: {delay}": "모든 랭크의 모든 단계가 늦음: {delay}",
    "update = {update}, {workers} workers": "update = {update}, 워커 {workers}개",
    "update = {update}": "update = {update}",
    "{workers} workers": "워커 {workers}개",
    "{steps} steps": "{steps}단계",
    "mode {mode}": "모드 {mode}",
    "no cost of an instruction itself": "명령 자체의 비용 없음",
    "each instruction costs {overhead} units more": "명령마다 {overhead}단위 추가",
    "{few} or {many} stages of {units} equal layers": "같은 층 {units}개의 스테이지 {few}개 또는 {many}개",
    "against {schedule}": "{schedule}과 비교",
    "{stages} equal stages": "같은 스테이지 {stages}개",
    "{stages} stages, the last {slowest} times slower": "스테이지 {stages}개, 마지막은 {slowest}배 느림",
    "gradients are sent before a weight half of {weight} of 2 units": (
        "2단위 중 {weight}단위인 가중치 절반 전에 기울기를 보냄"
    ),
    "{schedule}, {micro_batches} micro-batches": "{schedule}, 마이크로배치 {micro_batches}개",
    "{chunks} chunks, messages cost nothing": "청크 {chunks}개, 메시지 비용 없음",
    "{chunks} chunks, a message costs {receive} units": "청크 {chunks}개, 메시지마다 {receive}단위",
    "the weight half takes {weight} units": "가중치 절반이 {weight}단위",
    "stage {stage} of 4, the fullest": "4개 중 스테이지 {stage}, 가장 찬 것",
    "stage {stage} of 4, the last": "4개 중 스테이지 {stage}, 마지막",
    "schedule {schedule}": "스케줄 {schedule}",
    "stage {stage}, {micro_batches} micro-batches": "{stage}단계, 마이크로배치 {micro_batches}개",
    "{layers} layers": "층 {layers}개",
    "optimizer {optimizer}": "최적화기 {optimizer}",
    "tensor parallelism alone": "텐서 병렬만",
    "sequence parallelism that gathers again": "다시 모으는 시퀀스 병렬",
    "gathered inputs are saved": "모은 입력을 저장",
    "gathered inputs are gathered again": "입력을 다시 모음",
    "batch {batch}, context {context}, width {width}": "배치 {batch}, 문맥 {context}, 너비 {width}",
    "recompute = {recompute}": "recompute = {recompute}",
    "attention = {attention}": "attention = {attention}",
    "width {width}, batch {batch}": "너비 {width}, 배치 {batch}",
    "width {width}, context {context}": "너비 {width}, 문맥 {context}",
    "{schedule}, {stages} stages": "{schedule}, 스테이지 {stages}개",
    "{ranks} ranks, {micro_batches} micro-batches, {compute}": "랭크 {ranks}개, 마이크로배치 {micro_batches}개, {compute}",
    "k = {factor}": "k = {factor}",
    "{dtype}": "{dtype}",
    "reading {read} ms, computing {compute} ms": "읽기 {read} ms, 계산 {compute} ms",
}

NUMBERS = {
    "% idle by formula": "공식의 유휴 %",
    "% idle": "유휴 %",
    "% idle, 1F1B": "유휴 %, 1F1B",
    "% idle, 2": "유휴 %, 2개",
    "% idle, 64": "유휴 %, 64개",
    "% idle, GPipe": "유휴 %, GPipe",
    "% idle, few stages": "유휴 %, 적은 스테이지",
    "% idle, many stages": "유휴 %, 많은 스테이지",
    "% lost": "손실 %",
    "MB, asynchronous": "비동기 MB",
    "MB, synchronous": "동기 MB",
    "MFLOP by the rule": "규칙의 MFLOP",
    "MFLOP": "MFLOP",
    "MFLOP, recomputed": "재계산한 MFLOP",
    "bytes by formula": "공식의 바이트",
    "bytes of a block": "블록 하나의 바이트",
    "bytes of its two halves": "두 절반의 바이트",
    "bytes of one all-reduce": "all-reduce 한 번의 바이트",
    "bytes of the all-reduce": "all-reduce의 바이트",
    "bytes of the ring": "링의 바이트",
    "bytes of the server": "서버의 바이트",
    "bytes on 2 ranks": "랭크 2개의 바이트",
    "bytes on 6 ranks": "랭크 6개의 바이트",
    "bytes on 8 ranks": "랭크 8개의 바이트",
    "bytes sent": "보낸 바이트",
    "bytes with ZeRO": "ZeRO의 바이트",
    "bytes with float32": "float32의 바이트",
    "bytes with int8": "int8의 바이트",
    "bytes without": "ZeRO 없는 바이트",
    "bytes, 1 server": "바이트, 서버 1개",
    "bytes, 2 servers": "바이트, 서버 2개",
    "bytes, all-reduce": "바이트, all-reduce",
    "bytes, data parallel": "바이트, 데이터 병렬",
    "bytes, local SGD": "바이트, 로컬 SGD",
    "bytes, tensor parallel": "바이트, 텐서 병렬",
    "elements": "원소",
    "idle units, GPipe": "유휴 단위, GPipe",
    "idle units, interleaved": "유휴 단위, 인터리브",
    "idle units, one chunk": "유휴 단위, 청크 하나",
    "idle units, zero-bubble": "유휴 단위, 제로 버블",
    "kB of state": "상태 kB",
    "kB with ZeRO": "ZeRO의 kB",
    "kB with recomputation": "재계산의 kB",
    "kB without": "없을 때 kB",
    "kB, 1024 tokens": "kB, 토큰 1024개",
    "kB, 16 micro-batches": "kB, 마이크로배치 16개",
    "kB, 2": "kB, 2개",
    "kB, 512 tokens": "kB, 토큰 512개",
    "kB, bfloat16": "kB, bfloat16",
    "kB, float32": "kB, float32",
    "kB, model": "모델 kB",
    "last loss": "마지막 손실",
    "last loss, whole": "마지막 손실, 전체",
    "loss, batches of 8": "손실, 배치 8",
    "loss, larger batches": "손실, 큰 배치",
    "micro-batches saved": "저장한 마이크로배치",
    "ms ahead": "미리 읽기 ms",
    "ms in turn": "차례로 ms",
    "ms of the ring": "링의 ms",
    "ms of the tree": "트리의 ms",
    "saved, 1F1B": "저장, 1F1B",
    "saved, zero-bubble": "저장, 제로 버블",
    "steps ahead": "앞선 단계",
    "times faster, 2 workers": "빨라진 배수, 워커 2개",
    "times faster, 6": "빨라진 배수, 6개",
    "updates late": "늦은 갱신",
}

OTHERS = {
    "holds": "성립한다",
    "holds only if": "다음 조건에서만 성립한다",
    "does not hold here": "여기서는 성립하지 않는다",
    "true": "참",
    "false": "거짓",
    "published in": "출처",
    "elsewhere": "그 밖에서는",
    "{measure}; true if {relation} {threshold}": "{measure}; {relation} {threshold}이면 참",
    "Claims of textbooks, measured": "교과서 문장의 측정",
    "holds: {holds}, holds only if: {only}, does not hold here: {fails}": (
        "성립 {holds}개, 조건부 성립 {only}개, 불성립 {fails}개"
    ),
}

CLAIMS = {**SENTENCES, **MEASURES, **SETTINGS, **NUMBERS, **OTHERS}
