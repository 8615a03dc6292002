"""Chats whose hidden states place the embedded model's router rows. Plain texts of several kinds."""

CHATS: tuple[tuple[str, str], ...] = (
    (
        "What is the capital of France?",
        "The capital of France is Paris. It lies on the river Seine and has about two million inhabitants.",
    ),
    (
        "Write a Python function that adds two numbers.",
        "Here is a function:\n\n```python\ndef add(a, b):\n    return a + b\n```\n\n"
        "Call it as `add(2, 3)` to get 5.",
    ),
    (
        "Explain photosynthesis in simple words.",
        "Plants take in light, water and carbon dioxide. With the energy of the light they build sugar,"
        " and they give off oxygen that animals breathe.",
    ),
    (
        "A train travels 60 km in 45 minutes. What is its speed in km/h?",
        "45 minutes are 0.75 hours. 60 / 0.75 = 80, so the train travels at 80 km/h.",
    ),
    (
        "Give me a list of five fruits.",
        "1. Apple\n2. Banana\n3. Orange\n4. Mango\n5. Grape",
    ),
    (
        "Tell me a short story about a lighthouse.",
        "Every evening old Marta climbed the narrow stairs and lit the lamp. One night, in a heavy storm,"
        " a small boat followed her light home, and in it sat the brother she had thought lost at sea.",
    ),
    (
        "Translate 'Good morning, my friend' to Spanish.",
        'In Spanish you would say: "Buenos días, mi amigo."',
    ),
    (
        "How do I write a polite email asking for a day off?",
        "Subject: Request for leave on Friday\n\nDear Ms. Chen,\n\nI would like to take next Friday off for"
        " a family matter. My work will be finished by Thursday.\n\nKind regards,\nSam",
    ),
    (
        "Which planets have rings?",
        "Saturn's rings are the best known, but Jupiter, Uranus and Neptune have rings too, thin and dark.",
    ),
    (
        "Why is the sky blue?",
        "Air scatters short wavelengths of sunlight more than long ones, so blue light comes from all over.",
    ),
    (
        "Give me a recipe for pancakes.",
        "Mix 200 g flour, 2 eggs, 300 ml milk and a pinch of salt. Heat some butter in a pan, pour in a ladle"
        " of batter and fry each side for about two minutes until golden brown.",
    ),
    (
        "What is the difference between a process and a thread?",
        "A process has its own memory. Threads run inside one process and share its memory, so they are"
        " cheaper to start, but must take care not to change the same data at once.",
    ),
)
"""Pairs of what the user says and what the assistant answers."""
