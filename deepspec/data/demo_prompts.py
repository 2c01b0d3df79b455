"""A prompt set written for this project: arithmetic stories, small Python tasks, short explanations and chat.

Everything is drawn from one seed. Held-out prompts use other numbers, tasks and topics than training prompts. Knows no
files and no models.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest


def _items(text: str) -> tuple[str, ...]:
    return tuple(" ".join(item.split()) for item in text.split(";"))


NAMES = _items(
    """
    Anna; Ben; Carla; David; Elena; Farid; Grace; Hugo; Ines; Jamal; Kira; Liam; Maya; Noah; Olga; Peter; Quinn;
    Rosa; Sam; Tara; Umar; Vera; Will; Yara; Zoe
    """
)
THINGS = _items(
    """
    apples; oranges; books; pencils; stickers; marbles; cookies; stamps; cards; shells; balloons; candies;
    flowers; eggs; muffins; toys; coins; beads; buttons; tickets
    """
)
PLACES = _items(
    """
    shop; market; bakery; school; library; farm; museum; garden; factory; hotel
    """
)

# Each template: sentence with fields, and the range of the numbers a, b, c. Numbers keep every answer whole.
STORIES: tuple[tuple[str, tuple[int, int], tuple[int, int], tuple[int, int]], ...] = (
    ("{n} has {a} {t}. {m} gives {n} {b} more {t}. How many {t} does {n} have now?", (5, 60), (3, 40), (1, 1)),
    ("{n} had {ab} {t} and gave {b} of them to {m}. How many {t} are left?", (5, 60), (3, 40), (1, 1)),
    ("A {p} sells {a} {t} every day. How many {t} does it sell in {b} days?", (4, 30), (2, 14), (1, 1)),
    ("{n} packs {prod} {t} into boxes of {b}. How many boxes are needed?", (3, 20), (2, 12), (1, 1)),
    (
        "{n} buys {a} {t} for {b} dollars each and pays with a {big} dollar bill. How much change does {n} get?",
        (2, 9),
        (2, 9),
        (1, 1),
    ),
    (
        "{n} picks {a} {t} in the morning and {b} in the afternoon, then eats {c} of them. How many are left?",
        (8, 40),
        (8, 40),
        (2, 7),
    ),
    ("There are {a} rows of chairs with {b} chairs in each row. {c} more chairs are added. How many chairs are there?",
     (3, 15), (4, 12), (2, 20)),
    ("{n} reads {a} pages a day. How many pages does {n} read in {b} days? If the book has {morepages} pages, "
     "how many pages remain?", (6, 30), (3, 9), (5, 60)),
    ("A train travels {a} kilometers per hour for {b} hours. How far does it travel?", (30, 120), (2, 9), (1, 1)),
    ("{n} earns {a} dollars an hour and works {b} hours a day for {c} days. How much does {n} earn in total?",
     (8, 25), (3, 9), (2, 6)),
    ("The {p} had {a} visitors on Monday, {b} on Tuesday and {c} on Wednesday. How many visitors came in total?",
     (20, 150), (20, 150), (20, 150)),
    ("{n} is {a} years old. {m} is {b} years older than {n}. How old will {m} be in {c} years?",
     (6, 40), (2, 15), (2, 12)),
    ("What is {a} plus {b}? Then multiply the result by {c}.", (5, 60), (5, 60), (2, 6)),
    ("A rectangle is {a} meters long and {b} meters wide. What is its area, and what is its perimeter?",
     (4, 25), (2, 20), (1, 1)),
    ("{n} saves {a} dollars each week. After {b} weeks {n} spends {c} dollars. How much money is left?",
     (15, 60), (3, 12), (5, 40)),
    ("{n} shares {prod} {t} equally among {b} friends. How many {t} does each friend get?", (3, 15), (2, 9), (1, 1)),
    ("One ticket costs {a} dollars. {n} buys {b} tickets and {m} buys {c} tickets. How much do they pay together?",
     (4, 20), (2, 8), (2, 8)),
    ("A bus has {ab} passengers. At the first stop {b} get off and {c} get on. How many passengers are on the bus?",
     (6, 30), (3, 15), (2, 12)),
)  # fmt: skip

CODE_TASKS = _items(
    """
    returns the sum of a list of numbers; returns the largest number in a list; returns the smallest number in a
    list; reverses a string; checks whether a string is a palindrome; counts the vowels in a string; counts the
    words in a sentence; returns the factorial of a number; returns the n-th Fibonacci number; checks whether a
    number is prime; checks whether a number is even; removes duplicates from a list; sorts a list of numbers in
    ascending order; merges two sorted lists; returns the average of a list of numbers; returns the median of a
    list of numbers; converts Celsius to Fahrenheit; converts Fahrenheit to Celsius; converts kilometers to miles;
    counts how often each character occurs in a string; returns the intersection of two lists; returns the union
    of two lists; flattens a nested list; returns the greatest common divisor of two numbers; returns the least
    common multiple of two numbers; capitalizes the first letter of every word; removes all spaces from a string;
    returns the longest word in a sentence; checks whether two strings are anagrams; returns the squares of all
    numbers in a list; filters the even numbers out of a list; filters the negative numbers out of a list; returns
    the second largest number in a list; multiplies two matrices; transposes a matrix; returns the sum of the
    digits of a number; converts a decimal number to binary; converts a binary string to a decimal number; prints
    the multiplication table of a number; rotates a list by k positions; finds the index of an element in a list;
    performs a binary search on a sorted list; sorts a list with bubble sort; sorts a list with insertion sort;
    checks whether a year is a leap year; computes the area of a circle; computes the area of a triangle; computes
    the power of a number; returns the absolute difference of two numbers; swaps the keys and values of a
    dictionary; merges two dictionaries; sorts a dictionary by its values; counts the lines of a text file; reads
    a file and returns its lines as a list; writes a list of strings to a file; checks whether a list is sorted;
    returns the elements at even positions of a list; splits a list into chunks of size n; joins a list of words
    into a sentence; replaces every occurrence of a word in a string; counts how often a value occurs in a list;
    returns True if a string contains only digits; validates a simple email address; generates a list of random
    integers; computes the dot product of two vectors; returns the last element of a list; returns the unique
    characters of a string; computes simple interest; computes compound interest; converts seconds to hours,
    minutes and seconds
    """
)
CODE_FORMS = (
    "Write a Python function that {x}.",
    "Write a short Python function that {x}, with an example of how to call it.",
    "How do I write a Python function that {x}?",
    "Please write Python code that {x} and explain it briefly.",
    "In Python, write a function named `solve` that {x}.",
    "Show me a simple Python function that {x}. Add a docstring.",
)

TOPICS = _items(
    """
    photosynthesis; gravity; the water cycle; how rainbows form; why the sky is blue; how plants grow; how
    vaccines work; the solar system; how computers store data; machine learning; the internet; electricity;
    magnetism; recycling; climate change; renewable energy; how airplanes fly; how bees make honey; the human
    heart; the immune system; why we sleep; how volcanoes erupt; what causes earthquakes; the seasons of the year;
    the moon's phases; how bread is made; how glass is made; supply and demand; inflation; how banks work;
    democracy; the Roman Empire; the Renaissance; the Industrial Revolution; how to read a map; healthy eating;
    time management; learning a new language; public speaking; saving money; growing tomatoes; caring for a dog;
    caring for houseplants; starting to run; better sleep; writing a good essay; preparing for a job interview;
    studying for an exam; staying focused at work; reducing stress; cooking pasta; making good coffee; packing for
    a trip; taking better photos; riding a bicycle safely; working in a team; being a good listener; building a
    habit; reading more books; drawing for beginners; DNA; black holes; ocean tides; friction; sound waves; the
    food chain; fossils; deserts; rainforests; migration of birds
    """
)
TOPIC_FORMS = (
    "Explain {x} in two or three sentences.",
    "Tell me about {x} in simple words.",
    "Give me three short tips or facts about {x}.",
    "I am new to this. Can you give me a short introduction to {x}?",
    "Why should people know about {x}? Answer briefly.",
    "Summarize the most important things to know about {x}.",
)
PAIRS = _items(
    """
    cats and dogs; tea and coffee; a lake and a river; a virus and a bacterium; weather and climate; a planet and
    a star; a list and a tuple in Python; hardware and software; a novel and a short story; butter and margarine;
    a frog and a toad; speed and velocity; mass and weight; a simile and a metaphor; a violin and a guitar; a city
    and a village; running and walking; a noun and a verb; the Internet and the Web; a debit card and a credit
    card; a comet and an asteroid; an alligator and a crocodile; baking and frying; heat and temperature
    """
)
PAIR_FORMS = (
    "What is the difference between {x}?",
    "Compare {x} in a few sentences.",
    "How can I tell {x} apart?",
)
WRITING = _items(
    """
    a thank-you note to a neighbor who watered the plants; a birthday message for a friend; a polite email asking
    for a day off; a short poem about the sea; a short poem about autumn; a two-sentence story about a lost key; a
    short description of a sunny beach; an invitation to a picnic; a slogan for a small bakery; a product
    description for a water bottle; a short story about a brave mouse; an apology for being late to a meeting; a
    message congratulating a colleague; a shopping list for a simple dinner; a description of a rainy day; a short
    review of a good restaurant; a welcome message for a new teammate; a short poem about a cat; a note for a
    teacher; a to-do list for cleaning a kitchen
    """
)
WRITING_FORMS = ("Write {x}.", "Can you write {x}? Keep it short.", "Help me write {x}.")


def _story(rng: random.Random, heldout: bool) -> str | None:
    """One story, or None when its numbers belong to the other half of the split."""
    text, range_a, range_b, range_c = rng.choice(STORIES)
    n, m = rng.sample(NAMES, 2)
    a, b, c = (rng.randint(*bounds) for bounds in (range_a, range_b, range_c))
    if ((a + b + c) % 5 == 2) != heldout:
        return None
    return text.format(
        n=n, m=m, t=rng.choice(THINGS), p=rng.choice(PLACES), a=a, b=b, c=c, ab=a + b, prod=a * b,
        big=20 if a * b < 20 else 50 if a * b < 50 else 100, morepages=a * b + c,
    )  # fmt: skip


def _crossed(subjects: Sequence[str], forms: tuple[str, ...]) -> list[str]:
    return [form.format(x=subject) for subject in subjects for form in forms]


def _split(subjects: Sequence[str], heldout: bool) -> list[str]:
    """Every seventh subject is held out, so the two halves never share one."""
    return [subject for index, subject in enumerate(subjects) if (index % 7 == 3) == heldout]


def _math(rng: random.Random, heldout: bool) -> Iterator[str]:
    while True:
        if (text := _story(rng, heldout)) is not None:
            yield text


def _code(rng: random.Random, heldout: bool) -> Iterator[str]:
    texts = _crossed(_split(CODE_TASKS, heldout), CODE_FORMS)
    rng.shuffle(texts)
    yield from texts


def _chat(rng: random.Random, heldout: bool) -> Iterator[str]:
    texts = (
        _crossed(_split(TOPICS, heldout), TOPIC_FORMS)
        + _crossed(_split(PAIRS, heldout), PAIR_FORMS)
        + _crossed(_split(WRITING, heldout), WRITING_FORMS)
    )
    rng.shuffle(texts)
    yield from texts


DOMAINS: dict[str, Callable[[random.Random, bool], Iterator[str]]] = {"math": _math, "code": _code, "chat": _chat}


def generate(seed: int = 0, train_math: int = 600, heldout_each: int = 40) -> Iterator[dict[str, object]]:
    """Yield rows {"prompt", "source", "split"}: domains in turn, so any leading part is mixed; all texts distinct.

    Training has ``train_math`` stories and every code and chat text of the training subjects (about 1 400 in all);
    held-out has ``heldout_each`` texts of each domain.
    """
    seen: set[str] = set()
    for split in ("heldout", "train"):
        columns: list[list[dict[str, object]]] = []
        for domain, texts in DOMAINS.items():
            rng = random.Random(f"{seed}/{split}/{domain}")
            limit = heldout_each if split == "heldout" else train_math if domain == "math" else 10**9
            column: list[dict[str, object]] = []
            for text in texts(rng, split == "heldout"):
                if len(column) == limit:
                    break
                if text not in seen:
                    seen.add(text)
                    column.append({"prompt": text, "source": domain, "split": split})
            columns.append(column)
        for row in zip_longest(*columns):
            yield from (item for item in row if item is not None)
