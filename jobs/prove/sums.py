"""Conversations of sums, for a model that learns them: its answers are right for 90% of held-out sums.

python jobs/prove/sums.py make             write gpt2/ (random values), sums.jsonl and words.jsonl
python jobs/prove/sums.py score RUN FILE   ask a run the last tenth of the questions in a file

mpitrain/formats/README.md has the commands between. It needs transformers.
"""

import json
import random
import subprocess
import sys

NAMES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(name: str, question: str) -> None:
    sums = [(a, b) for a in range(50) for b in range(50)]
    random.Random(0).shuffle(sums)
    with open(name, "w") as file:
        for a, b in sums[:2000]:
            user = {"role": "user", "content": question.format(a, b)}
            answer = {"role": "assistant", "content": str(a + b)}
            file.write(json.dumps({"messages": [user, answer]}) + "\n")


def make() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    write("sums.jsonl", "What is {} + {}?")
    write("words.jsonl", "How much is {} plus {}?")
    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train(
        ["sums.jsonl"],
        trainers.BpeTrainer(vocab_size=400, special_tokens=NAMES, initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=NAMES[0])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("gpt2")
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 128, "n_layer": 3}
    GPT2LMHeadModel(GPT2Config(**sizes, n_head=4, bos_token_id=0, eos_token_id=0)).save_pretrained(
        "gpt2"
    )


def score(run: str, name: str) -> None:
    with open(name) as file:
        asked = [json.loads(line)["messages"] for line in file][-200:]
    prompt = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    with open("prompts.jsonl", "w") as file:
        for user, _ in asked:
            file.write(json.dumps({"prompt": prompt.format(user["content"])}) + "\n")
    words = f"mpitrain generate {run} --prompts prompts.jsonl --temperature 0 --tokens 4 --json --batch 200"
    said = subprocess.run(words.split(), stdout=subprocess.PIPE, text=True, check=True).stdout
    answers = [json.loads(line)["text"] for line in said.splitlines()]
    right = sum(answer == turn["content"] for answer, (_, turn) in zip(answers, asked, strict=True))
    print(f"{right} of {len(asked)} held-out sums are right")


if __name__ == "__main__":
    make() if sys.argv[1] == "make" else score(*sys.argv[2:])
