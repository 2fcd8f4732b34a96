"""Headings and captions of the pictures in a report; {side} is the side with better scores, above or below."""

from __future__ import annotations

EARNED_BY_DESKS = (
    "Rewards of the desks during training",
    "The mean log return per day, after fees, over the real and synthetic days of a round, by the number of days that "
    "a desk has trained on. Ticks mark aggregations. The shade spans the seeds.",
)
CAPTIONS = {
    "rewards": (
        "Rewards of the agents",
        "The mean return of the episodes that ended in a round, exploration included, by the steps of an agent. Ticks "
        "mark aggregations. The shade spans the seeds.",
    ),
    "curves": (
        "Score by round",
        "Where a line is {side} the dashed line of Local, joining helps on average. Parties that never trained count "
        "too: they are evaluated with the global model, or under Local with the initial model. The shade spans the "
        "seeds.",
    ),
    "parties": (
        "Party by party",
        "The black line is local training. On the side of it that the title names, a party gained by joining; on the "
        "other side it lost.",
    ),
    "spikes": (
        "Change of the parties' models at aggregation",
        "The change of a party's model between the end of its local training and the start of the next. Methods that "
        "replace it with the global model change it a lot; the paper saw spikes where training collapsed. The shade is "
        "one standard deviation over the parties.",
    ),
    "collapse": (
        "Does training stay stable?",
        "Above: the training loss of the parties that took part in a round, or where parties earn rewards the "
        "cumulative reward beyond local training. A line that turns for the worse and stays there has lost what it had "
        "learned. Below: the norm of the global model, which jumps where training breaks down. A dotted vertical line "
        "marks a collapse.",
    ),
    "interpolation": (
        "From the personal models to the global model",
        "A trial of one more round. On the left: the parties' models after local training. On the right: the global "
        "model aggregated from them. Between them: mixtures. A line that falls to the right says that replacing the "
        "personal models with the global model would cost the parties; a line that rises, that it would help them.",
    ),
    "hyperparameters": (
        "Tuned hyperparameters",
        "Learning rate and work by round. Dots are the drawn values (first seed). Lines are the mean of the "
        "distribution, or the value itself where nothing is drawn. A dotted vertical line marks a rollback to an "
        "earlier global model after a collapse.",
    ),
    "portfolio": (
        "Value of the portfolios",
        "Above: the mean value of the desks in the test period, after fees, each with its own policy. Below: the "
        "distance from the previous peak. The gray lines are trivial strategies.",
    ),
    "weights": (
        "Holdings of a portfolio",
        "The holdings of the first desk in the test period, for the first few methods, with the first seed. Cash is "
        "gray. An asset's name stands beside its share at the end or, if it was sold, beside its largest share.",
    ),
    "presence": (
        "Participation and coreset proxies",
        "Above, one row per party: dark where it trained, orange where a coreset proxy replaced it, gray where it was "
        "absent, white before its first round. Below: the global model on each party's own test set. A line that falls "
        "where its row turns gray is a party that is being forgotten. With the first seed.",
    ),
}
