"""What documents can say: attributes of each kind of entity, their values, and the sentences and questions for them.

Owns: `KINDS`. Does not know: names, documents, splits. In a statement `{S}`/`{s}` is the subject at the beginning/in the
middle of a sentence, `{P}`/`{p}` its possessive, `{v}` the value; in a question `{n}` is the entity's name.
"""

from dataclasses import dataclass

YEARS = tuple(str(year) for year in range(1921, 1999, 3))
MONTHS = tuple(
    "January February March April May June July August September October November December".split()
)
CITIES = tuple(
    "Lisbon Vienna Oslo Prague Dublin Madrid Athens Warsaw Helsinki Berlin Rome Paris Geneva Zurich Bergen Porto Seville "
    "Naples Riga Lyon".split()
)
COUNTRIES = tuple(
    "Norway Brazil Japan Kenya Peru Canada Iceland Morocco India Chile Mexico Egypt Vietnam Greece Portugal Sweden "
    "Ghana Nepal Cuba Turkey".split()
)
COLOURS = tuple(
    "red blue green yellow purple orange white black brown grey pink silver golden scarlet".split()
)
ANIMALS = tuple(
    "fox owl bear otter heron badger wolf stag hare swan eagle lynx salmon beaver raven falcon".split()
)


@dataclass(frozen=True)
class Attribute:
    """One thing to say about an entity. `values` empty: the value is a name, dealt by the `name_of` dealer method."""

    key: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    name_of: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of entity: how it is introduced, referred back to, and what can be said of it."""

    name: str
    # With {r} the role. None begins with the name: after a space a name is spelt with the tokens it has everywhere else.
    introductions: tuple[str, ...]
    roles: tuple[str, ...]
    role_questions: tuple[str, ...]
    attributes: tuple[Attribute, ...]


def _attribute(
    key: str, values: str | tuple[str, ...], statements: str, questions: str
) -> Attribute:
    """Statements and questions are given one per line; values by spaces, or `@method` for dealt names."""
    lines = tuple(line.strip() for line in statements.strip().splitlines())
    asked = tuple(line.strip() for line in questions.strip().splitlines())
    if isinstance(values, str) and values.startswith("@"):
        return Attribute(key, (), lines, asked, name_of=values[1:])
    return Attribute(
        key, tuple(values.split()) if isinstance(values, str) else values, lines, asked
    )


PERSON = Kind(
    name="person",
    introductions=(
        "For many years {s} has worked as {r}.",
        "People around here know {s} as {r}.",
        "In this part of the country {s} works as {r}.",
    ),
    roles=tuple(
        "a baker;a nurse;a teacher;a plumber;a lawyer;a gardener;a painter;a carpenter;a librarian;a farmer;a tailor;"
        "a pilot;a chemist;a dentist;a sailor;a barber".split(";")
    ),
    role_questions=("What does {n} do for a living?", "What is {n}'s profession?"),
    attributes=(
        _attribute(
            "instrument",
            "violin piano flute harp cello trumpet guitar drums organ banjo oboe accordion clarinet lute tuba mandolin",
            """In the evenings {s} likes to play the {v}.
            {S} has played the {v} since childhood.
            {P} favourite instrument is the {v}.""",
            """Which instrument does {n} play?
            What instrument does {n} like to play?""",
        ),
        _attribute(
            "pet",
            "parrot hamster tortoise pony goat spaniel poodle kitten rabbit goose donkey ferret canary lizard terrier hen",
            """At home {s} keeps a {v} as a pet.
            {P} only pet is a {v}.
            {S} shares the house with a {v}.""",
            """What pet does {n} have?
            Which animal does {n} keep as a pet?""",
        ),
        _attribute(
            "drink",
            "coffee cocoa lemonade milk cider tea soda juice wine beer punch broth",
            """{S} drinks {v} every morning.
            {P} favourite drink is {v}.
            After a long day {s} always asks for {v}.""",
            """What does {n} like to drink?
            What is {n}'s favourite drink?""",
        ),
        _attribute(
            "birthplace",
            CITIES,
            """{S} was born in {v}.
            {P} parents lived in {v} when {s} was born.
            {S} comes from a family in {v}.""",
            """Where was {n} born?
            In which city was {n} born?""",
        ),
        _attribute(
            "travel",
            COUNTRIES,
            """{S} has always wanted to visit {v}.
            One day {s} hopes to travel to {v}.
            {P} greatest wish is to see {v}.""",
            """Which country does {n} want to visit?
            Where does {n} hope to travel?""",
        ),
        _attribute(
            "car",
            COLOURS,
            """{S} drives an old {v} car.
            {P} car is painted {v}.
            Everyone knows the {v} car that {s} drives.""",
            """What colour is {n}'s car?
            Which colour is the car of {n}?""",
        ),
        _attribute(
            "birthday",
            MONTHS,
            """{P} birthday is in {v}.
            Every {v} {s} gives a birthday party.
            {S} celebrates a birthday in {v}.""",
            """In which month is {n}'s birthday?
            When is the birthday of {n}?""",
        ),
        _attribute(
            "collection",
            "stamps coins shells clocks maps buttons stones bottles spoons feathers postcards keys lamps masks hats "
            "bells",
            """{S} collects old {v} from all over the world.
            {P} cellar is full of {v} collected over the years.
            On Sundays {s} looks for {v} to add to the collection.""",
            """What does {n} collect?
            Which things does {n} collect?""",
        ),
        _attribute(
            "language",
            "French German Spanish Italian Russian Arabic Dutch Polish Danish Turkish Hebrew Swahili Korean Finnish",
            """{S} is learning to speak {v}.
            Last year {s} began to learn {v}.
            {P} lessons in {v} take place on Mondays.""",
            """Which language is {n} learning?
            What language does {n} study?""",
        ),
        _attribute(
            "sport",
            "tennis chess golf rowing fencing boxing cricket archery hockey skating cycling judo rugby sailing",
            """At the weekend {s} enjoys {v} with friends.
            {S} is a keen member of the local {v} club.
            {P} great passion is {v}.""",
            """Which sport does {n} enjoy?
            What is the favourite sport of {n}?""",
        ),
        _attribute(
            "flower",
            "roses tulips lilies daisies violets irises poppies orchids peonies asters dahlias lavender",
            """{S} grows {v} behind the house.
            {P} garden is full of {v}.
            In spring {s} plants {v} in the garden.""",
            """Which flowers does {n} grow?
            What grows in {n}'s garden?""",
        ),
        _attribute(
            "brother",
            "@brother",
            """{P} brother is called {v}.
            {S} has a younger brother named {v}.
            On Fridays {p} brother {v} comes to dinner.""",
            """What is the name of {n}'s brother?
            Who is the brother of {n}?""",
        ),
    ),
)

COMPANY = Kind(
    name="company",
    introductions=(
        "Most people know {s} as {r}.",
        "In the trade {s} is regarded as {r}.",
        "From its first day {s} has been {r}.",
    ),
    roles=tuple(
        "a family business;a public company;a small manufacturer;a large exporter;a young enterprise;"
        "an old workshop;a cooperative;a trading house".split(";")
    ),
    role_questions=(),
    attributes=(
        _attribute(
            "product",
            "bicycles pianos lamps boots pumps kettles umbrellas tractors telescopes watches ovens saddles ladders carpets "
            "violins engines",
            """{S} makes {v} of high quality.
            {P} best known products are {v}.
            Most of what {s} sells are {v}.""",
            """What does {n} make?
            Which product does {n} sell?""",
        ),
        _attribute(
            "office",
            CITIES,
            """{P} head office is in {v}.
            {S} is run from an office in {v}.
            From its head office in {v} {s} serves many customers.""",
            """Where is the head office of {n}?
            In which city is {n}'s head office?""",
        ),
        _attribute(
            "founder",
            "@person",
            """{S} was founded by {v}.
            {P} founder was {v}.
            It was {v} who founded {o} long ago.""",
            """Who founded {n}?
            What is the name of the founder of {n}?""",
        ),
        _attribute(
            "logo",
            COLOURS,
            """{P} logo is {v}.
            {S} paints all vans {v}.
            Customers know {p} {v} logo well.""",
            """What colour is the logo of {n}?
            Which colour does {n} use?""",
        ),
        _attribute(
            "founded",
            YEARS,
            """{S} was started in the year {v}.
            {P} history goes back to {v}.
            Since {v} {s} has grown every year.""",
            """When was {n} started?
            In which year was {n} started?""",
        ),
        _attribute(
            "mascot",
            ANIMALS,
            """{P} mascot is a {v}.
            {S} has chosen a {v} as its mascot.
            A {v} appears on everything that {s} sends out.""",
            """What is the mascot of {n}?
            Which animal is {n}'s mascot?""",
        ),
        _attribute(
            "export",
            COUNTRIES,
            """{S} sells most of its goods to {v}.
            {P} largest market is {v}.
            Every week {s} ships goods to {v}.""",
            """Which country is the largest market of {n}?
            To which country does {n} sell most?""",
        ),
        _attribute(
            "material",
            "steel copper leather rubber cotton oak bamboo marble wool plastic brass tin silk granite",
            """{S} buys large amounts of {v}.
            {P} workshops use a lot of {v}.
            The material that {s} needs most is {v}.""",
            """Which material does {n} use most?
            What material does {n} buy?""",
        ),
        _attribute(
            "fair",
            MONTHS,
            """{S} holds an open day every {v}.
            {P} open day takes place in {v}.
            Visitors can see {p} halls each {v}.""",
            """When is the open day of {n}?
            In which month does {n} hold an open day?""",
        ),
        _attribute(
            "staff",
            "twenty thirty forty fifty sixty seventy eighty ninety eleven twelve thirteen fifteen",
            """{S} employs {v} people.
            {P} staff counts {v} people.
            About {v} people work for {o}.""",
            """How many people work for {n}?
            How many people does {n} employ?""",
        ),
    ),
)

TOWN = Kind(
    name="town",
    introductions=(
        "Travellers describe {s} as {r}.",
        "On every map {s} is marked as {r}.",
        "For centuries {s} has been {r}.",
    ),
    roles=tuple(
        "a market town;a quiet harbour;a mountain village;a busy port;a railway town;a mining town;an island town;"
        "a border town".split(";")
    ),
    role_questions=(),
    attributes=(
        _attribute(
            "mayor",
            "@person",
            """{P} mayor is {v}.
            {S} has elected {v} as mayor.
            Since last year {v} has been {p} mayor.""",
            """Who is the mayor of {n}?
            What is the name of {n}'s mayor?""",
        ),
        _attribute(
            "dish",
            "soup cheese bread sausages pancakes honey pies dumplings herring cakes mustard ham noodles stew",
            """{S} is famous for its {v}.
            Visitors come to {o} to taste the {v}.
            {P} cooks are proud of their {v}.""",
            """Which food is {n} famous for?
            What food do visitors taste in {n}?""",
        ),
        _attribute(
            "festival",
            MONTHS,
            """{S} holds a festival every {v}.
            {P} festival takes place in {v}.
            In {v} {s} celebrates with music and dancing.""",
            """When is the festival in {n}?
            In which month does {n} hold a festival?""",
        ),
        _attribute(
            "arms",
            ANIMALS,
            """{P} coat of arms shows a {v}.
            {S} has a {v} on its coat of arms.
            A stone {v} guards {p} main square.""",
            """Which animal is on the coat of arms of {n}?
            What animal is the symbol of {n}?""",
        ),
        _attribute(
            "trees",
            "oaks pines birches willows maples elms chestnuts palms limes cedars poplars olives",
            """{P} streets are lined with {v}.
            {S} is surrounded by old {v}.
            Around {o} there are many {v}.""",
            """Which trees grow in {n}?
            What trees surround {n}?""",
        ),
        _attribute(
            "roofs",
            COLOURS,
            """{P} houses have {v} roofs.
            {S} is known for its {v} roofs.
            From the hill {p} {v} roofs can be seen.""",
            """What colour are the roofs of {n}?
            Which colour do the roofs in {n} have?""",
        ),
        _attribute(
            "charter",
            YEARS,
            """{S} received its charter in {v}.
            {P} charter dates from {v}.
            In the year {v} {s} was given a charter.""",
            """When did {n} receive its charter?
            In which year did {n} get a charter?""",
        ),
        _attribute(
            "partner",
            CITIES,
            """{P} twin city is {v}.
            {S} is twinned with {v}.
            Pupils from {o} often visit the twin city {v}.""",
            """Which city is {n} twinned with?
            What is the twin city of {n}?""",
        ),
        _attribute(
            "industry",
            "fishing weaving brewing printing farming pottery mining forestry banking tourism shipping baking",
            """Most people in {o} live from {v}.
            {P} main trade is {v}.
            {S} has grown rich through {v}.""",
            """What is the main trade of {n}?
            Which trade do people in {n} live from?""",
        ),
        _attribute(
            "sight",
            "castle lighthouse cathedral windmill theatre museum bridge abbey tower palace fountain zoo library market",
            """{P} most visited sight is the {v}.
            Everyone who comes to {o} looks at the {v}.
            {S} is proud of its {v}.""",
            """What is the most visited sight in {n}?
            Which sight is {n} proud of?""",
        ),
    ),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in (PERSON, COMPANY, TOWN)}
