"""Prompts for the equality tests: (messages or text)."""

from __future__ import annotations

LONG = " ".join(
    f"Entry {i}: day {i * 3 % 28 + 1}, the ferry carried {i * 37 % 211} people and {i * 13 % 97} crates to {i % 9}."
    for i in range(56)
)

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "Name three rivers."}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Is water wet?"}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada."},
        {"role": "user", "content": "What is my name?"},
    ],
    [
        {"role": "system", "content": "You are a terse calculator."},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "times 10"},
        {"role": "assistant", "content": "40"},
        {"role": "user", "content": "minus 7"},
    ],
    [{"role": "user", "content": "Wie heißt die Hauptstadt von Österreich?"}],
    [{"role": "user", "content": "¿Qué es la fotosíntesis?"}],
    [{"role": "user", "content": "日本の首都はどこですか。"}],
    [{"role": "user", "content": "Что такое река?"}],
    [{"role": "user", "content": "ما هي عاصمة مصر؟"}],
    [{"role": "user", "content": "हिन्दी में नमस्ते कहें"}],
    [{"role": "user", "content": "Write a haiku about deltas 🌊"}],
    [{"role": "user", "content": f"{LONG}\n\nHow many people were on the ferry in entry 12?"}],
]

TEXTS = [
    "a",
    " ",
    "The",
    "1234567890 + 987654321 =",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the river,",
    "SELECT name FROM rivers WHERE length_km >",
    "<html><head><title>",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Q: Why is the sky blue?\nA:",
    "import numpy as np\n\nx = np.array([1, 2, 3])\nprint(x.",
    "Le petit prince demanda :",
    "长江是亚洲最长的",
    "Ποταμός είναι",
    "עברית היא שפה",
    "In 1969, Apollo 11 landed on the Moon. In 1970, Apollo 13",
    "x = 0\nwhile x < 10:\n    x +=",
    "Dear Sir or Madam,\n\nI am writing to",
    "\n\n\n",
    "ferry ferry ferry ferry ferry",
]
