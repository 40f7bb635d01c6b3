"""Korean texts of the reasons for which a file is wrong: the file, its steps and their simulation."""

REASONS = {
    "it takes more than {most} MiB": "{most} MiB보다 많은 메모리를 쓴다",
    "it raises {kind}{text}": "예외 {kind}이(가) 일어난다{text}",
    "it raises {kind} in line {line}{text}": "{line}번째 줄에서 예외 {kind}이(가) 일어난다{text}",
    "the file must define {function}": "파일은 {function}을(를) 정의해야 한다",
    "{call} must return a list, but it contains or is a {kind}": (
        "{call}은(는) 목록을 반환해야 하는데 {kind}이거나 {kind}을(를) 포함한다"
    ),
    "{call} must return a short list, but one has {entries:,} entries": (
        "{call}은(는) 짧은 목록을 반환해야 하는데 항목이 {entries:,}개인 목록이 있다"
    ),
    "{function} of rank {rank} must yield its collectives, but only returns": (
        "랭크 {rank}의 {function}은(는) 집단 통신을 yield해야 하는데 반환만 한다"
    ),
    "{function} must return after its collectives, but yields more than 100 times": (
        "{function}은(는) 집단 통신 뒤에 반환해야 하는데 100번 넘게 yield한다"
    ),
    "the ranks wait forever: {waits}": "랭크들이 영원히 기다린다: {waits}",
    "rank {rank} waits in {name}": "랭크 {rank}는 {name}에서 기다린다",
    "rank {rank} has returned": "랭크 {rank}는 반환했다",
    "an all-reduce needs one shape, but has {shapes}": (
        "all-reduce의 배열은 모양이 같아야 하는데 {shapes}이다"
    ),
    'rank {rank} must yield ("all-reduce", array) or ("all-gather", array), but yields {found}': (
        '랭크 {rank}는 ("all-reduce", array)나 ("all-gather", array)를 yield해야 하는데 '
        "{found}을(를) yield한다"
    ),
    "the result of rank {rank} must be an array of numbers, but is {kind}": (
        "랭크 {rank}의 결과는 수의 배열이어야 하는데 {kind}이다"
    ),
    "{call} must return a list of steps, but it is {found}": (
        "{call}은(는) 단계의 목록을 반환해야 하는데 {found}이다"
    ),
    "{call} has {steps:,} steps, more than {most:,}": "{call}의 단계가 {steps:,}개로 {most:,}개보다 많다",
    "step {step} of {call} must be (sends, receives, adds), but it is {found}": (
        "{call}의 단계 {step}은 (sends, receives, adds)이어야 하는데 {found}이다"
    ),
    "step {step} of {call} must list (peer, start, stop) of integers, but has {found}": (
        "{call}의 단계 {step}에는 정수로 된 (peer, start, stop)이 있어야 하는데 {found}이(가) 있다"
    ),
    "step {step} of {call} names peer {peer}, which is no other rank": (
        "{call}의 단계 {step}에 있는 상대 {peer}는 다른 랭크가 아니다"
    ),
    "step {step} of {call} names elements {start} to {stop} of {count}": (
        "{call}의 단계 {step}에 원소 {count}개 중 {start}~{stop}이 있다"
    ),
    "step {step} of rank {rank} receives element {start} twice": (
        "랭크 {rank}의 단계 {step}은 원소 {start}을(를) 두 번 받는다"
    ),
    "step {step} of rank {rank} sends element {start} and replaces it": (
        "랭크 {rank}의 단계 {step}은 원소 {start}을(를) 보내면서 바꾼다"
    ),
    "rank {rank} sends {sent} elements to rank {peer}, which receives {received}": (
        "랭크 {rank}는 원소 {sent}개를 보내는데 랭크 {peer}는 {received}개를 받는다"
    ),
    "no message can move: {waits}": "움직일 수 있는 메시지가 없다: {waits}",
    "rank {rank} waits in step {step} to send to rank {peer}": (
        "랭크 {rank}는 단계 {step}에서 랭크 {peer}에 보내려고 기다린다"
    ),
    "rank {rank} waits in step {step} to receive from rank {peer}": (
        "랭크 {rank}는 단계 {step}에서 랭크 {peer}에게서 받으려고 기다린다"
    ),
    "element {start} of rank {rank} has the value of rank {other} {times} times, and must have it {wanted} times": (
        "랭크 {rank}의 원소 {start}에는 랭크 {other}의 값이 {wanted}번 있어야 하는데 {times}번 있다"
    ),
    "step {step} of rank {rank} begins before step {before} ends, but both have element {start}": (
        "랭크 {rank}의 단계 {step}은 단계 {before}이(가) 끝나기 전에 시작하는데 둘 다 원소 {start}을(를) 쓴다"
    ),
    "ranks {rank} and {other} sum element {start} in another order, so their results differ by rounding": (
        "랭크 {rank}와 {other}는 원소 {start}을(를) 다른 순서로 더하므로 결과가 반올림만큼 다르다"
    ),
    "stage {stage} has finished": "스테이지 {stage}는 끝났다",
    "stage {stage} waits until stage {peer} receives the {what} of micro-batch {micro} for chunk {chunk}": (
        "스테이지 {stage}는 스테이지 {peer}가 청크 {chunk}의 마이크로배치 {micro}의 {what}을(를) 받기를 기다린다"
    ),
    "stage {stage} waits for the {what} of micro-batch {micro} for chunk {chunk}, from stage {source}": (
        "스테이지 {stage}는 스테이지 {source}에서 올 청크 {chunk}의 마이크로배치 {micro}의 {what}을(를) 기다린다"
    ),
    "activation": "활성값",
    "gradient": "기울기",
}
