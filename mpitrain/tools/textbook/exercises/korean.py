"""The Korean of the exercises: statements, laws and words of results."""

STATEMENTS = {
    "ring": """반대 방향으로 도는 링의 all-reduce.

각 랭크는 rank - 1에만 보내고 rank + 1에서만 받는다 (ranks로 나눈 나머지).
청크의 크기는 다르다. 원소 count개를 ranks개의 청크로 나누어 각각 count // ranks개이고,
처음 count % ranks개의 청크는 하나씩 더 많다.
메시지 하나는 청크 하나 전체이다. 끝나면 모든 랭크가 모든 배열의 합을 가진다.

이 랭크의 단계 목록을 반환하라. 단계는 (sends, receives, adds)이다. 앞의 둘은
(peer, start, stop)의 목록이고, adds는 받은 원소를 더하는지(True) 바꾸는지(False)이다.""",
    "server": """크기가 다른 매개변수 서버의 메시지.

랭크 0부터 servers - 1까지가 서버이고, 그다음 workers개의 랭크가 워커이다.
서버 k는 원소 count개 중 cut(k)부터 cut(k + 1)까지를 저장한다.
cut(k) = count * k * (k + 1) // (servers * (servers + 1)). 서버 k의 몫은 k + 1에 비례한다.
각 워커는 모든 서버에 기울기의 해당 몫을 보낸다. 서버는 기울기를 더하고
합을 각 워커에 보낸다. 서버에는 기울기가 없고, 워커끼리는 보내지 않는다.
끝나면 모든 워커가 모든 워커의 배열의 합을 가진다.

이 랭크의 단계 목록을 반환하라. 단계는 (sends, receives, adds)이다. 앞의 둘은
(peer, start, stop)의 목록이고, adds는 받은 원소를 더하는지(True) 바꾸는지(False)이다.""",
    "1f1b": """스테이지 3개의 파이프라인에서 역전파를 나누지 않는 1F1B.

스테이지 0에는 첫 층들이, 스테이지 2에는 마지막 층들과 손실이 있다. 역전파는 명령 하나이고
입력 절반과 가중치 절반으로 나누지 않는다.
스테이지 s는 순전파부터 역전파의 끝까지 동시에 많아야 3 - s개 마이크로배치의
활성값을 저장한다. 어떤 스테이지도 필요 이상으로 쉬지 않는다.

이 스테이지의 계산 순서를 글자의 목록으로 반환하라. "F0"은 마이크로배치 0의 순전파,
"B0"은 역전파이다. 메시지에는 명령이 필요 없다.""",
    "column": """ReLU를 사이에 둔 두 선형 층의 텐서 병렬: 먼저 행, 다음에 열.

y = relu(x a) b. x는 (B, I), a는 (I, H), b는 (H, O) 모양이다.
이 랭크는 x의 일부 열, a의 같은 행, b의 일부 열을 가진다.
랭크마다 몫의 크기가 다를 수 있다. 모든 랭크가 (B, O) 모양의 y 전체를 반환한다.

함수는 제너레이터이다. 다음 두 줄은 모든 랭크가 도달해야 하는 집단 통신이다:
    total = yield "all-reduce", array     # 모든 랭크의 배열의 합
    arrays = yield "all-gather", array    # 모든 랭크의 배열의 목록
원소를 되도록 적게 보내라. y는 `return`으로 반환하라.""",
}
"""Statements by the name of their exercise."""

EXERCISES = {
    "exercise": "연습 문제",
    "right": "맞음",
    "wrong": "틀림",
    "{right} of {all} cases": "{all}개 중 {right}개의 경우",
    "smallest counterexample": "가장 작은 반례",
    "{right} of {files} files are right": "파일 {files}개 중 {right}개가 맞음",
    "{cost}: at most {formula}": "{cost}: 많아야 {formula}",
    "Check it with: mpitrain learn check FILE": "검사: mpitrain learn check FILE",
    "2 count - the two smallest neighbouring chunks": "2 count - 이웃한 두 청크의 가장 작은 합",
    "max(count, workers x largest share)": "max(count, workers x 가장 큰 몫)",
    "3 (micro_batches + 2)": "3 (micro_batches + 2)",
    "(n - 1) / n (2 B H + B O)": "(n - 1) / n (2 B H + B O)",
    "elements sent by the busiest rank": "가장 바쁜 랭크가 보내는 원소",
    "time of a step in forwards": "순전파 단위의 한 단계 시간",
    "elements that a rank sends by rings": "링에서 한 랭크가 보내는 원소",
    "it gives no answer within {seconds:g} s": "{seconds:g}초 안에 답이 없다",
    "its process ended with {ended} and no answer": "프로세스가 답 없이 {ended}(으)로 끝났다",
    "the answer has more than {most} characters": "답이 {most}자보다 길다",
    "the cost ({name}) must be at most {formula:g}, but is {counted:g}": (
        "비용({name})은 많아야 {formula:g}이어야 하는데 {counted:g}이다"
    ),
    "a message of rank {rank} has elements {start} to {stop}, which are no chunk": (
        "랭크 {rank}의 메시지의 원소 {start}~{stop}은 청크가 아니다"
    ),
    "rank {rank} sends to rank {other}, and must do so with rank {peer} alone": (
        "랭크 {rank}는 랭크 {other}에 보내지만 랭크 {peer}에만 보내야 한다"
    ),
    "rank {rank} receives from rank {other}, and must do so with rank {peer} alone": (
        "랭크 {rank}는 랭크 {other}에서 받지만 랭크 {peer}에서만 받아야 한다"
    ),
    "rank {rank} exchanges with rank {peer}, but only a worker and a server may": (
        "랭크 {rank}는 랭크 {peer}와 주고받지만 워커와 서버 사이만 허용된다"
    ),
    "elements {start} to {stop} go through server {server}, which stores {first} to {last}": (
        "원소 {start}~{stop}은 {first}~{last}를 저장하는 서버 {server}를 거친다"
    ),
    "the stages wait forever: {waits}": "스테이지들이 영원히 기다린다: {waits}",
    "stage {stage} may save {most} micro-batches at a time, but saves {live}": (
        "스테이지 {stage}는 동시에 마이크로배치 {most}개를 저장할 수 있는데 {live}개를 저장한다"
    ),
    "stage {stage} has no computation {one} with {micro_batches} micro-batches": (
        "마이크로배치가 {micro_batches}개일 때 스테이지 {stage}에는 계산 {one}이 없다"
    ),
    "stage {stage} must compute {one} once, but does so {times} times": (
        "스테이지 {stage}는 {one}을 한 번 계산해야 하는데 {times}번 계산한다"
    ),
    "stage {stage} has {one} before the forward of the same micro-batch": (
        "스테이지 {stage}에는 같은 마이크로배치의 순전파 전에 {one}이 있다"
    ),
    "the collectives move {counted:g} elements, but a result needs {formula:g}: "
    "ranks share no memory": (
        "집합 통신이 원소 {counted:g}개를 옮기지만 결과에는 {formula:g}개가 필요하다: "
        "랭크는 메모리를 공유하지 않는다"
    ),
    "rank {rank} must return the shape {expected}, but returns {found}": (
        "랭크 {rank}는 모양 {expected}를 반환해야 하는데 {found}를 반환한다"
    ),
    "rank {rank} must have {expected:g} in row {row}, column {column}, but has {found:g}": (
        "랭크 {rank}는 행 {row}, 열 {column}에 {expected:g}가 있어야 하는데 {found:g}이다"
    ),
}
