"""Varied prompts: short and long, prose, code, sums, languages, chats, and some that share a beginning."""

_STORY = (
    "The lighthouse keeper had not spoken to another soul since the first week of October, when the supply boat came "
    "through the fog with flour, lamp oil and a letter he did not open. "
)
_RULES = (
    "You are a careful assistant. Answer in one short paragraph. If you do not know, say so. Never invent names, "
    "numbers or sources, and keep to the language of the question. "
)

TEXTS = [
    "The",
    "2 + 2 =",
    "Once upon a time",
    "The capital of France is",
    "Water boils at",
    "My favourite colour is",
    "In 1969, humans first",
    "The opposite of hot is",
    "def fibonacci(n):\n",
    '{"name": "Alice", "age": 30, "city":',
    "<html>\n<head>\n<title>",
    "#include <stdio.h>\n\nint main(void) {\n",
    "fn main() {\n    let words = vec![",
    "A, B, C, D, E,",
    "1, 1, 2, 3, 5, 8,",
    "Monday, Tuesday, Wednesday,",
    "Roses are red, violets are blue,",
    "La capitale de la France est",
    "El perro corre por",
    "東京は",
    "Привет, как",
    "naïve café — “quoted” … 🙂",
    "   leading spaces and\ttabs\n\n\nand lines",
    "THE QUICK BROWN FOX JUMPS OVER",
    "Q: Who wrote Hamlet?\nA:",
    "Translate to French: 'Good morning' ->",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n-",
    "Step 1: Preheat the oven to 180 degrees.\nStep 2:",
    "The theory of relativity states that",
    "Machine learning is a field of study that",
    "The mitochondria is the powerhouse of",
    "To be, or not to be,",
    "It was the best of times, it was the worst of times,",
    "The three primary colours are",
    "Here is a haiku about the sea:\n",
    "Breaking news: scientists have discovered",
    "$E = mc^2$ means that",
    "Proof. Let $n$ be an even number. Then",
    "https://www.example.com/index.html?q=",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    _STORY + "That night",
    _STORY + "In the morning he",
    _STORY + "The letter said",
    _STORY * 4 + "At last,",
    _STORY * 9 + "And so",
    _RULES + "Question: what is a prime number?",
    _RULES + "Question: why is the sky blue?",
    _RULES + "Question: ¿qué es un volcán?",
]

CHATS = [
    "Hello!",
    "What is the capital of Italy?",
    "Write a short poem about autumn.",
    "Explain gravity to a child.",
    "Give me three tips for sleeping well.",
    "What is 17 times 3?",
    "Write a Python function that reverses a string.",
    "Summarize: The cat sat on the mat. The dog barked. The cat ran away.",
]
