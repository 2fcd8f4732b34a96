"""What stands with the pictures of a report: a heading and how to read it; {side} is where better scores are."""

from __future__ import annotations

EARNED_BY_DESKS = (
    "What the desks earned as they learned",
    "The mean logarithm of what a day makes of the value, fees paid, over the days that a round learned by, real and "
    "made up, by how many days a desk has learned by; ticks are merges. The shade spans the seeds.",
)
CAPTIONS = {
    "rewards": (
        "What the agents earned",
        "The mean return of the episodes that ended in a round, exploring included, by the steps of an agent; ticks "
        "are merges. The shade spans the seeds.",
    ),
    "curves": (
        "Score by round",
        "Where a line is {side} the dashed one of Local, joining helps on average. Parties that never trained count, "
        "too: they are judged by the centre, or alone by the model that all began with. The shade spans the seeds.",
    ),
    "parties": (
        "Party by party",
        "The black line is training alone; on the side of it that the title names, a party gained by joining, and on "
        "the other side it lost.",
    ),
    "spikes": (
        "How far an aggregation throws the parties",
        "How much a party's model changes between the end of its local work and the beginning of the next. Methods "
        "that put a common model in its place throw it far; the paper saw spikes where training collapsed. The shade "
        "is one standard deviation over the parties.",
    ),
    "collapse": (
        "Does what was learned stay learned?",
        "Above, the training loss of those who took part in a round, or, where they earn rewards, what they earned "
        "beyond training alone up to then: a line that turns down for good has lost what it had learned. Below, the "
        "length of the common model, which leaps where a training breaks down. A dotted upright marks a collapse.",
    ),
    "interpolation": (
        "From the own model to the common one",
        "What one more round would do. On the left, the parties' models after their local work; on the right, the "
        "centre made of them; between them, mixtures. A line that falls to the right says that taking over the common "
        "model would cost the parties; a line that rises, that it would serve them.",
    ),
    "hyperparameters": (
        "What was tuned",
        "Learning rate and work by round: dots are what was drawn (with the first seed), lines the mean of the "
        "distribution, or the value itself where nothing is drawn. A dotted upright marks where a training had "
        "collapsed and went back to an earlier model.",
    ),
    "portfolio": (
        "What became of the portfolios",
        "Above, the mean value of the desks in the time of the test, fees paid, each with its own policy; below, how "
        "far it stands under its peak. The grey lines need no skill.",
    ),
    "weights": (
        "What a portfolio holds",
        "The shares of the first desk in the time of the test, by the first few methods, with the first seed; cash is "
        "grey. An asset's name stands beside what is held of it at the end, or, where it was sold, where most was.",
    ),
    "presence": (
        "Who was there, and who was stood in for",
        "Above, a row a party: dark where it trained, orange where a stand-in answered for it, grey where nobody did, "
        "white before it came for the first time. Below, the common model on each party's own test set: a line that "
        "falls where its row turns grey is a party that is being forgotten. With the first seed.",
    ),
}
