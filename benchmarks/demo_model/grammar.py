"""A grammar of short children's stories, written for this project.

The demo model is trained on nothing but what this file generates. Every story takes a cast
(people or talking animals), some things, some places and the weather, puts them through one of
the plots below and closes with a thought about what happened. Facts are kept within a story (who
has what, how many are left, which way leads home) and between stories (what a kind of animal
eats, where it lives, what it is good at, who can mend what), so that there is something to learn.

Templates use two notations: ``[a|b|c]`` stands for one of the alternatives and may be nested,
``{name}`` and ``{name.attribute}`` are replaced from the scene as in ``str.format``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Row = dict[str, str]

MIN_WORDS = 60
MAX_WORDS = 150
HABIT_ODDS = 0.75  # how often a kind gets one of its usual names, traits and places


def _table(columns: str, text: str) -> list[Row]:
    """Reads a table written as text.

    Args:
        columns: The names of the columns, separated by blanks.
        text: One row per line, the cells separated by ``|``.

    Returns:
        One dictionary per row.
    """
    names = columns.split()
    rows = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows]


def _slots(text: str) -> tuple[str, ...]:
    """Splits a plot into its sentences: blank lines part them, line ends count as blanks."""
    return tuple(" ".join(part.split()) for part in text.strip().split("\n\n"))


def _words(text: str) -> tuple[str, ...]:
    """Splits a list of single words."""
    return tuple(text.split())


# --------------------------------------------------------------------------------------------
# The world
# --------------------------------------------------------------------------------------------

HIS_NAMES = _words("""
Tom Ben Max Sam Leo Finn Oskar Hugo Milo Jasper Otto Pip Rollo Barnaby Felix Theo Anton Bruno
Casper Emil Fergus Gus Henrik Ivo Jonas Linus Monty Nils Rufus Silas Tobias Wilbur
""")
HER_NAMES = _words("""
Anna Bella Clara Daisy Ella Fay Greta Hazel Ida Juno Kira Lily Mina Nora Olive Poppy Rosa Stella
Tilda Una Vera Willa Yara Zoe Agnes Cora Dora Edith Gwen Hattie Josie Mabel
""")

SKILLS = {
    "fly": "flying",
    "climb": "climbing",
    "dig": "digging",
    "swim": "swimming",
    "sniff": "finding things by smell",
    "strong": "lifting heavy things",
    "see": "seeing in the dark",
    "sew": "sewing",
    "build": "building",
    "forge": "working with iron",
    "mould": "working with clay",
    "paste": "working with paper",
    "bake": "baking",
    "heal": "making people well",
    "run": "running",
    "sing": "singing",
}

KINDS = _table(
    "noun plural homes foods moved says traits skill haunts sex",
    """
rabbit | rabbits | in a snug burrow under the hedge / below the old oak | carrots / clover | hopped | squeaked | shy / quick / gentle | run | meadow / garden |
fox | foxes | in a den among the roots / behind the waterfall | blackberries / grapes | trotted | barked | clever / quick / hungry | sniff | forest / orchard |
bear | bears | in a warm cave / behind the great rock | honey / salmon | lumbered | growled | sleepy / kind / grumpy | strong | forest / mountain |
mouse | mice | in a hole behind the stove / under the kitchen floor | cheese / crumbs | scampered | squeaked | shy / busy / polite | sew | barn / mill |
squirrel | squirrels | high in the hazel tree / in a round nest of twigs | nuts / acorns | leaped | chattered | busy / quick / careful | climb | forest / park |
owl | owls | in the church tower / in the hollow elm | moths / midnight pies | glided | hooted | wise / patient / grumpy | see | forest / barn |
duck | ducks | among the reeds / beside the duck pond | bread / pondweed | waddled | quacked | cheerful / boastful / merry | swim | pond / river |
frog | frogs | on a broad lily leaf / under the wet stones | gnats / water plums | hopped | croaked | merry / lazy / boastful | swim | pond / meadow |
otter | otters | in a hole in the river bank / under the willow roots | trout / crabs | slid | whistled | playful / merry / brave | swim | river / lake |
beaver | beavers | in a lodge of sticks / behind the dam | bark / willow twigs | paddled | grunted | busy / patient / honest | build | river / lake |
mole | moles | at the end of a long tunnel / under the lawn | worms / roots | shuffled | mumbled | quiet / patient / stubborn | dig | meadow / garden |
robin | robins | in a nest in the ivy / above the garden door | berries / seeds | flew | chirped | cheerful / brave / polite | fly | garden / orchard |
crow | crows | at the top of the poplar / on the castle wall | corn / cherries | flew | cawed | clever / proud / hungry | fly | field / castle |
cat | cats | on a cushion by the window / above the baker's shop | cream / sardines | crept | purred | lazy / proud / curious | climb | village / harbour |
dog | dogs | in a kennel by the gate / on the mat by the door | sausages / bones | ran | barked | honest / playful / brave | sniff | village / park |
pony | ponies | in the green stable / behind the white fence | hay / apples | galloped | neighed | gentle / proud / playful | strong | meadow / field |
goat | goats | on the rocky hill / beside the well | thistles / cabbages | climbed | bleated | stubborn / curious / hungry | climb | mountain / field |
donkey | donkeys | in the tumbledown shed / behind the inn | straw / parsnips | plodded | brayed | stubborn / patient / lonely | strong | market / mill |
pig | pigs | in the muddy sty / beside the apple barn | potatoes / beans | trotted | grunted | hungry / cheerful / lazy | sniff | barn / orchard |
tortoise | tortoises | under the rose bush / beside the sundial | melons / dandelions | crawled | murmured | patient / wise / quiet | heal | garden / park |
swan | swans | on a small green island / near the boathouse | water lilies / rye bread | sailed | sang | proud / gentle / lonely | sing | lake / castle |
boy | boys | in a red house by the road / over the toy shop | pancakes / jam | ran | shouted | curious / playful / brave | climb | village / school | he
girl | girls | in a yellow house by the bridge / next to the school | waffles / plums | skipped | called | curious / clever / brave | run | village / school | she
grandmother | grandmothers | in the last cottage of the village / beside the chapel | porridge / tea cakes | walked | said | kind / wise / generous | sew | market / garden | she
grandfather | grandfathers | in a hut with a crooked chimney / next to the old pump | soup / roasted chestnuts | strolled | said | patient / kind / generous | build | harbour / park | he
baker | bakers | behind the warm bakery / under the sign of the bun | gingerbread / raisins | hurried | said | cheerful / busy / generous | bake | market / village |
blacksmith | blacksmiths | beside the smoky forge / at the crossroads | mutton / onions | marched | roared | brave / honest / grumpy | forge | village / market |
potter | potters | beside the round kiln / at the foot of the clay hill | olives / peas | strolled | said | quiet / careful / gentle | mould | market / river |
printer | printers | above the printing shop / in the narrow lane | noodles / biscuits | hurried | declared | careful / polite / clever | paste | school / market |
tailor | tailors | in a room full of cloth / under the steep stairs | dumplings / radishes | tiptoed | said | careful / polite / lonely | sew | market / village |
carpenter | carpenters | in a house of new planks / behind the timber yard | stew / pickles | marched | said | brave / patient / merry | build | harbour / mill |
doctor | doctors | in a white house with a brass bell / opposite the town hall | salad / lemons | hurried | answered | kind / careful / busy | heal | village / castle |
""",  # noqa: E501
)

TRAITS = {
    "shy": "hid whenever a stranger came",
    "quick": "was always the first to arrive",
    "gentle": "never stepped on a flower",
    "proud": "polished {his} boots three times a day",
    "boastful": "told everybody about {his} great deeds",
    "clever": "could answer any question",
    "hungry": "thought of supper right after breakfast",
    "sleepy": "yawned in the middle of a song",
    "kind": "left crumbs on the sill for the sparrows",
    "grumpy": "complained about the noise of the rain",
    "busy": "had no time to sit down",
    "polite": "bowed to every neighbour",
    "patient": "could wait a whole day without a sigh",
    "careful": "looked twice before every step",
    "wise": "was asked for advice by old and young",
    "quiet": "spoke no more than ten words a day",
    "cheerful": "whistled from morning to night",
    "merry": "danced even without music",
    "lazy": "stayed in bed until noon",
    "playful": "turned every chore into a game",
    "brave": "was not afraid of thunder",
    "honest": "had never told a lie",
    "stubborn": "would not turn back for anything",
    "curious": "peeped into every box and basket",
    "lonely": "talked to the moon at night",
    "generous": "gave away half of all {he} had",
}

THINGS = _table(
    "noun looks stuff use",
    """
kite | red / striped / long-tailed | cloth | fly {it} on windy days
scarf | woollen / purple / warm | cloth | wind {it} around the neck
blanket | soft / checked / green | cloth | sleep under {it}
flag | yellow / silk / striped | cloth | wave {it} from the roof
coat | thick / brown / patched | cloth | button {it} up to the chin
pillow | feather / soft / white | cloth | rest on {it} after lunch
mittens+ | red / knitted / warm | cloth | throw snowballs with {it}
slippers+ | soft / velvet / blue | cloth | shuffle about in {it}
drum | round / painted / loud | wood | beat {it} in parades
flute | slender / wooden / sweet | wood | play slow tunes on {it}
wagon | little / green / creaky | wood | pull {it} up the lane
boat | toy / white / tiny | wood | sail {it} on the water
lantern | brass / old / bright | metal | light the path with {it}
bell | silver / tiny / golden | metal | ring {it} for supper
key | rusty / iron / golden | metal | open the secret door with {it}
bucket | tin / dented / shiny | metal | carry water in {it}
trumpet | brass / shiny / loud | metal | wake the neighbours with {it}
skates+ | steel / sharp / shiny | metal | glide over the ice on {it}
spectacles+ | round / golden / old | metal | read tiny letters with {it}
teapot | blue / round / flowered | clay | pour peppermint tea from {it}
bowl | blue / deep / glazed | clay | eat breakfast from {it}
piggy bank | pink / round / heavy | clay | save pennies in {it}
marbles+ | glazed / spotted / tiny | clay | roll {it} down the hall
book | thick / old / leather | paper | read aloud from {it}
map | folded / secret / yellowed | paper | plan journeys with {it}
umbrella | paper / spotted / big | paper | keep dry under {it}
letter | long / sealed / secret | paper | read {it} again and again
""",
)

PLACES = _table(
    "noun prep keeper sights spots",
    """
forest | in | woodcutter | tall pines / a spotted deer / green moss | under a fallen log / in a hollow tree / behind the ferns
meadow | on | beekeeper | white butterflies / tall buttercups / a field mouse | in the long grass / beside the molehill / under the daisies
garden | in | gardener | climbing roses / a busy bee / fat pumpkins | behind the watering can / under the rhubarb / between the tulips
orchard | in | cider maker | ripe apples / a buzzing wasp / bent branches | behind the cider barrel / under the ladder / in the apple basket
field | in | farmer | waving corn / a scarecrow / red poppies | behind the scarecrow / in the furrow / under the hay cart
mountain | on | guide | snowy peaks / an eagle / a narrow path | in a crack of the rock / behind the waterfall / under the overhang
river | by | ferryman | silver fish / a heron / round pebbles | between the pebbles / under the bridge / among the willows
lake | by | boatman | calm water / a wooden boat / two swans | under the boat / behind the jetty / among the rushes
pond | by | angler | green frogs / water lilies / a dragonfly | among the cattails / under a lily leaf / behind the stump
beach | on | bathing master | white shells / rolling waves / a red crab | in a rock pool / under the seaweed / behind the dune
harbour | in | harbour master | fishing boats / wet nets / tall masts | under the nets / behind the barrels / inside the coiled rope
village | in | mayor | crooked roofs / smoking chimneys / a stone well | behind the well / under the cart / on the church steps
market | at | stallholder | piles of melons / bright ribbons / a juggler | under the cheese stall / behind the flower cart / between the crates
mill | at | miller | turning sails / sacks of flour / a white cat | behind the millstone / under the flour sacks / on the creaky stairs
barn | in | farmhand | golden hay / three hens / an old plough | under the hay / behind the plough / in the feed box
castle | at | guard | high towers / a rusty gate / stone lions | behind the throne / in the empty armour / under the drawbridge
school | at | teacher | a big blackboard / inky desks / paper stars | under the desk / behind the blackboard / in the coat room
park | in | park keeper | a fountain / neat paths / old statues | behind the statue / under the bench / beside the fountain
""",  # noqa: E501
)

WEATHER = _table(
    "season weather sky after",
    """
spring | rainy | drops were tapping on every leaf | the rain stopped
spring | windy | the wind was pulling at the young leaves | the wind grew calm
spring | mild | the first flowers were opening | the bees flew home
summer | hot | the air stood still over the fields | a cool breeze came
summer | sunny | the sky was blue from end to end | the shadows grew long
summer | stormy | thunder was rolling behind the hills | the storm passed
autumn | misty | a grey mist was hiding the trees | the mist lifted
autumn | breezy | golden leaves were dancing along the road | the leaves lay still
autumn | damp | mushrooms stood under every tree | the moon came out
winter | snowy | big flakes were falling on the roofs | the snow stopped falling
winter | frosty | ice flowers were growing on the windows | the ice began to drip
winter | dark | the lamps were lit before supper | the lamps burned low
""",
)

TIMES = ("morning", "afternoon", "evening", "day")
SAD = ("sad", "upset", "unhappy", "worried", "downhearted", "miserable")
GLAD = ("happy", "glad", "delighted", "joyful", "thankful", "overjoyed")
NUMBERS = _words("zero one two three four five six seven eight nine ten eleven twelve")
FAIRIES = _table(
    "fairy danger",
    """
tiny fairy | a spider web
goldfish | a drying puddle
water sprite | a fishing net
firefly | a jam jar
snow gnome | a warm oven
""",
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
COUNTED = _words("walnuts strawberries snails buttons feathers pebbles coins eggs pancakes roses")


# --------------------------------------------------------------------------------------------
# The plots
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plot:
    """A sequence of sentence templates.

    Attributes:
        lines: The templates, one per slot of the story.
        rows: Facts of which one row is drawn for a story. The column ``helper`` names the kinds
            or skills of which the second character ``f`` must have one, the column ``stuff`` what
            the thing ``o`` must be made of; the other columns can be used in the templates.
    """

    lines: tuple[str, ...]
    rows: Sequence[Row] = ()


OPENINGS = _slots("""
[Once upon a time|Long ago|Once] there was {h.a} [called|named] {h} who [lived|slept|made {h.his}
home|had a bed] {h.home}.

{h} was {h.a} who lived {h.home} and [loved|liked|was fond of|dreamed of] {h.food}.

{h.home} lived {h.a}. {h.his.cap} name was {h}, and {h.he} {h.habit}.

[Everyone|Nearly everyone|Everybody] {home.at} knew {h}, the {h.trait} {h.kind} who [lived
{h.home}|{h.habit}].

This is [the story|a tale] of {h}, {h.a} from {home}. {h.he.cap} {h.habit}.

{h} the {h.kind} was so {h.trait} that {h.he} {h.habit}.

Have you heard of {h}? {h.he.cap} was {h.a} and lived {h.home}.

There was no {h.kind} as {h.trait} as {h}. {h.he.cap} {h.habit}.
""")

SETTINGS = _slots("""
One {weather} {time} in {season}, [while|when] {sky}, {h} {h.moved} to {p}.

One {season} {time} {h} {h.moved} to {p}. It was {weather}, and {sky}.

On a {weather} {season} {time} {h} was {p.at}. [There {h.he} saw|{h.he.cap} was looking at]
{p.sight}.

It was a {weather} {time} in {season}. {h} {h.moved} to {p} to look at {p.sight}.
""")

CLOSINGS = _slots("""
That night {h} slept well {h.home}.

[From that day on|Since then], {h} and {f} [were the best of friends|met {p.at} every
{season}|shared their {h.food}].

And when {after}, {h} {h.moved} home.

And {h} [still lives|lives to this day] {h.home}.

Since then nobody calls {h} [{h.trait}|a {h.trait} {h.kind}] without [a smile|smiling].

When {after}, {h} and {f} ate {f.food} together [and laughed|].

Then {h} went home to eat {h.food}.

{h} was still {h.trait}, but never {sad} again.

And {f} went back to {f.his} bed {f.home}, as {glad} as {h}.
""")

STUCK = Plot(
    rows=_table(
        "helper mishap where first rescue",
        """
fly | the wind carried {o.the} to the top of a poplar | up in the poplar | jumped again and again | flew to the top and brought {o.it} down
climb | {o.the} got caught on the highest branch of a chestnut tree | up in the chestnut tree | shook the trunk | went from branch to branch and let {o.it} drop into the leaves
swim | {o.the} slid off the bridge and sank in the deep water | under the water | poked about with a pole | dived to the bottom and came up with {o.it}
swim | a big wave swept {o.the} out from the shore | out on the waves | waited for the tide | swam out and pushed {o.it} back to the sand
dig | a heap of sand slid down and buried {o.the} | under the sand | scratched with a twig | dug so fast that the sand flew, and pulled {o.it} out
strong | a heavy stone rolled down and trapped {o.the} | under the stone | pushed with all {h.his} might | lifted the stone with one great heave
strong | {o.the} sank into the thick mud | in the mud | pulled until {h.he} fell over | took a rope and hauled {o.it} out with a loud plop
see | {o.the} dropped into a pitch black cellar | down in the cellar | felt along the cold wall | walked into the dark without a lamp and returned with {o.it}
see | the lights went out and {o.the} got lost in the night | somewhere in the night | crawled about in the dark | blinked twice and spotted {o.it} at once
sniff | {o.the} slipped out of the bag in the tall nettles | in the nettles | searched left and right | put a nose to the ground and went straight to {o.it}
""",  # noqa: E501
    ),
    lines=_slots("""
{h} had {o.a}. One {weather} {time} {h.he} took {o.it} to {p}, and [suddenly|all at once] {mishap}.

{h} {first}, but {o.the} stayed {where}. [{h} was|So {h} sat down and was] {sad}.

[Just then|Soon|After a while] {f.a} [named|called] {f} [came by|came along|{f.moved} past]. "My
{o.noun} {o.are} {where}," {h.says} {h}.

"We {f.plural} are good at {f.skill}," {f.says} {f}. [And|So|And indeed,] {f} {rescue}.

"Thank you, {f}!" {h.says} {h}, [and hugged {o.the}|who was {glad} and gave {f.him} some {f.food}].
"""),
)

MEND = Plot(
    rows=_table(
        "stuff helper broke tool fix",
        """
cloth | sew | tore on a sharp thorn | a needle and thread | sewed up the hole with tiny stitches
wood | build | cracked down the middle | a saw and some nails | nailed a strip of oak over the crack
metal | forge | got bent under a cart wheel | a hammer and a hot fire | hammered until everything was straight
clay | mould | broke into three pieces | wet clay and a wheel | joined the pieces and baked them in the kiln
paper | paste | got ripped by the wind | paste and a flat brush | pasted the parts together, edge to edge
""",  # noqa: E501
    ),
    lines=_slots("""
{h.his.cap} greatest treasure was {o.a}. {h.he.cap} [loved|liked] to {o.use}. But [one {time}|last
{season}] {o.the} {broke}.

{h} was {sad} and asked {g} the {g.kind}, but {g.plural} [know more|only know] about {g.skill}.
"[Go to|Ask|You must see] {f}," {g.says} {g}. "{f.he} lives {f.home} and is good at {f.skill}."

So {h} took {o.the} and {h.moved} to the {f.kind}. {f} fetched {tool} and {fix}.

"Now {o.they} {o.are} as good as new," {f.says} {f}. {h} was {glad} and paid with {f.food}.
"""),
)

TRADE = Plot(
    lines=_slots("""
{h} had {o.a}, but {h.he} [wished for|dreamed of|wanted] {o3.a}.

{p.at} {h} met {f} the {f.kind}, who had {o2.a}. "[Will you trade|Shall we trade]?" asked {h}.
"[Gladly|Of course|With pleasure]," {f.says} {f}. "I want to {o.use}."

[Next|Then|After that] {h.he} {h.moved} to {q}. There {g.a} named {g} had {o3.a}! "[Take|I give
you] my {o2} for your {o3}," {h.says} {h}. "Now I can {o2.use}!" {g.says} {g}.

So {f} had {o.the}, {g} had {o2.the}, and {h} had {o3.the}. [All three were|Everybody was] {glad}.
"""),
)

GIFT = Plot(
    lines=_slots("""
{f} the {f.kind} was going to be {n3} years old. "[What should|What can] I give {f.him}?" {h}
wondered.

"[Maybe|Perhaps] {o.a}? No, {g} the {g.kind} is going to give {f.him} {o.a}."

[Then|At last|In the end] {h} asked the {q.keeper}. "Give {f.him} {o2.a}. {f} [would like|wants] to
{o2.use}."

[Luckily|And really], {h} found {o2.a} {p.at}, {p.spot}.

At the party, {f} first unpacked {o.the} from {g} and then {o2.the}. "[Now|At last] I can
{o2.use}," {f.says} {f}. "Thank you, {h}!"
"""),
)

SHARE = Plot(
    rows=_table(
        "helper trouble repay",
        """
fly | got lost in the fog | flew ahead and showed {h.him} the way
swim | fell into the cold stream | jumped in and pulled {h.him} out
strong | could not pass because a tree lay on the road | rolled the tree away
dig | was locked in a shed | dug a passage under the wall and let {h.him} out
climb | sat on a cliff and could not get down | climbed up with a rope and helped {h.him} down
build | had no roof after the storm | built {h.him} a new one from strong beams
bake | had an empty pantry | came with a cart full of fresh loaves
heal | lay in bed with a fever | sat by the bed and brewed {h.him} a bitter tea
forge | lost the key to {h.his} own door | made {h.him} a new iron key
run | had to warn the village of the flood | ran to the village faster than the water
""",
    ),
    lines=_slots("""
One {weather} {time} in {season} {h} sat down {p.at} to eat {h.food}. [There came|Along came|Up
came] {f.a}, [thin and tired|cold and hungry].

"[My name is|I am] {f}. I have not eaten for {n1} days," {f.says} {f.the}. "[Sit down|Come here],"
said {h}. "We will share my {h.food}."

{n2} weeks later, {h} {trouble}. [Suddenly|Then] {f} was there. {f.he.cap} {repay}.

"[Once|When I was hungry] you shared your {h.food} with me," {f.says} {f}. "Now I could help you."
"""),
)

CONTEST = Plot(
    rows=_table(
        "helper contest did test",
        """
run | a race | ran | from {p} to {q} and back
swim | a swimming match | swam | across the bay
sing | a singing contest | sang | until the judges wept
bake | a baking contest | baked | a cake with {n3} layers
climb | a climbing contest | climbed | to the top of the maypole
dig | a digging contest | dug | a hole as deep as a well
fly | a flying contest | flew | around the steeple {n3} times
strong | a tug of war | pulled | until the rope smoked
sew | a sewing contest | sewed | a flag in one hour
build | a building contest | built | a tower of {n3} floors
""",
    ),
    lines=_slots("""
{p.at} there was going to be {contest}, and the prize was {o.a}. {h} [wanted|hoped] to win and to
{o.use}.

"[I shall win|You will lose]," said {g} the {g.kind}, who was rather {g.trait}. [But|And] {f} the
{f.kind} only smiled, because {f.plural} are good at {f.skill}.

{h} and {g} {did} as well as they could, but {f} {did} {test}!

"{f} is the winner!" [called|cried] the judge. {h} was {sad}, but {h.he} clapped {h.his} hands.
"[Come tomorrow|Visit me], then you may {o.use} too," {f.says} {f}.
"""),
)

QUARREL = Plot(
    lines=_slots("""
[One {weather} {time}|In {season}] {h} and {h.his} friend {f} the {f.kind} found {o.a} {p.at}.
{o.they.cap} lay {p.spot}.

"[I saw {o.it} first|{o.they.cap} {o.are} mine]!" cried {h}. "I want to {o.use}." "No, I [saw
{o.it} first|picked {o.it} up]!" {f.says} {f}. They quarrelled for {n2} hours.

[Then|At last] {g} came by, {g.a}. "[Listen|That is easy]," {g.says} {g}. "On {day1} {h} may
{o.use}, and on {day2} it is the turn of {f}."

So {h} and {f} took turns, and {o.the} belonged to both of them.
"""),
)

RIDDLE = Plot(
    lines=_slots("""
@setting

[There|But there] stood {f.a} named {f}. "Nobody may pass who cannot guess my riddles," {f.says}
{f}.

"[Here is the first one|First riddle]: they live {g.home} and eat {g.food}." "[Those are|They must
be] {g.plural}!" {h.says} {h}.

"[Here is the second one|Second riddle]: you can {o.use}." "[That is|It must be] {o.any}!"

"[Now the last one|Third riddle]: a {k.kind} has {n3} {counted} and gives away {n1}. How many are
left?" "{n2}!"

So {f} [let {h.him} pass|gave {h.him} {o.a}], and {h} was {glad}.
"""),
)

JOURNEY = Plot(
    lines=_slots("""
{h} wanted to visit {f}, {f.a} who lived {f.home}. {h.he.cap} packed {h.food} and {o.the} and set
out.

First {h.he} came to {p}, then to {q}, and at last to {r}, [where {h.he} rested|and had lunch]
{r.spot}.

"[Welcome|Come in]!" {f.says} {f}. "I have seen {p.sight}, {q.sight} and {r.sight}," {h.says} {h}.

"[Now I must go home|It is late]," said {h}, "but which way?" "[Just turn everything around|The
same way back]," {f.says} {f}.

And so {h} {h.moved} to {r}, then to {q}, and then to {p}. [{o.the} lay safe in {h.his} bag.|Only
{o.the} had stayed with {f}, as a present.]
"""),
)

MESSAGE = Plot(
    rows=_table(
        "news reply",
        """
the bridge is closed | I shall take the ferry
the ship comes in on {day1} | I shall bake a cake by {day1}
the baby has its first tooth | I must see that tooth
the king wants {n3} {counted} | he can have {n2} of mine
there will be a dance {q.at} | I shall put on my best shoes
the well has run dry | I shall send {n1} barrels of water
school begins at {n3} o'clock | I shall get up at {n2}
somebody found {o.a} {q.at} | I lost {o.a} last {season}
""",
    ),
    lines=_slots("""
[One {weather} {time}|One {time} in {season}] {f} the {f.kind} called {h}. "Run to {g} the
{g.kind}, who lives {g.home}, and tell {g.him} that {news}."

{h} {h.moved} [off|away] and said it [again and again|at every step]: "{news}, {news}."

At last {h.he} reached {g}, who was [eating {g.food}|sitting {g.home}]. "{f} [says|wants you to
know] that {news}!"

"[Thank you|Good]," {g.says} {g}. "Then tell {f.him} this: {reply}." So {h} {h.moved} back to {f}
and said: "{reply}."
"""),
)

RECIPE = Plot(
    rows=_table(
        "dish first second third",
        """
apple pie | apples | flour | butter
pumpkin soup | a pumpkin | cream | ginger
plum jam | plums | sugar | a lemon
carrot cake | carrots | flour | nuts
fish stew | trout | onions | potatoes
honey bread | honey | rye | yeast
nut bread | nuts | milk | flour
cherry tart | cherries | almonds | dough
""",
    ),
    lines=_slots("""
[One {time}|On {day1}] {h} [wanted to make|felt like] {dish}. "For {dish} I need {first}, {second}
and {third}," {h.he} said. But the cupboard was [bare|empty].

"I have {first}," said {f} the {f.kind}, [the neighbour|who lived next door]. "I can give you
{second}," {g.says} {g}, who was {g.a}.

The only thing missing was {third}. {h} {h.moved} to {p}, and {p.spot} {h.he} [met|found] the
{p.keeper}, who sold {third} for {n1} pennies.

So {h} took {first}, {second} and {third}, and stirred. "Your {dish} is better than {f.food},"
{f.says} {f}. "[And|Or even] better than {g.food}," said {g}.
"""),
)

SICK = Plot(
    rows=_table(
        "helper illness sign remedy spotted",
        """
heal | a fever | was as hot as a stove | a cold cloth and mint tea | in the garden
heal | a toothache | had a cheek like a balloon | three cloves in a bag | at the market
heal | a sore throat | could only whisper | sage with honey | in the orchard
heal | the hiccups | hopped up and down in bed | nine sips of well water | in the village
heal | a headache | could not bear the light | a pillow of dried lavender | on the meadow
""",
    ),
    lines=_slots("""
But [one {weather} {time}|one {time}] {h.his} best friend {g} the {g.kind} had {illness}.
{g.he.cap} {sign}, and {h} was {sad}.

{h} {h.moved} to {f}, {f.a} who lived {f.home}. "{g} has {illness}," {h.says} {h}. "Against
{illness} there is nothing better than {remedy}," {f.says} {f}. "You [get it|find it] {spotted}."

[So {h}|At once {h}] {h.moved} away. And {spotted} {h.he} really found {remedy}.

{g} took {remedy}. "[I am well again|I feel fine]!" {g.says} {g} [the next morning|after {n1}
days]. "Now I could eat {g.food}!"
"""),
)

GARDEN = Plot(
    rows=_table(
        "seed crop first month dish",
        """
pumpkin seeds | pumpkins | round leaves | autumn | soup
beans | bean pods | curly tendrils | summer | salad
peas | pea pods | tiny white flowers | spring | soup
carrot seeds | carrots | feathery green | summer | cake
potatoes | new potatoes | dark green leaves | autumn | dumplings
strawberry plants | strawberries | small white stars | summer | jam
radish seeds | radishes | two round leaves | spring | salad
""",
    ),
    lines=_slots("""
{f} the {f.kind} gave {h} {n3} {seed}. "Plant them and wait," {f.says} {f}. "In {month} you will
see."

{h} dug a bed {p.at} and planted all {n3}. After {n1} days {h.he} saw {first}.

But {g} the {g.kind}, who was very {g.trait}, [trampled on|pulled up] {n1} of them. Only {n2} were
left, and {h} was {sad}. {g} was [ashamed|sorry] and built {h.him} a fence.

In {month} {h} [could pick|harvested] the {crop} and made {dish} from them. {f} [ate|had] {n2}
helpings of the {dish}. "[You see|Well], you only had to wait," {f.says} {f}.
"""),
)

TREASURE = Plot(
    rows=_table(
        "helper block clear",
        """
dig | the ground was as hard as iron | scratched and shovelled until the hole was deep
strong | a huge boulder lay on top | rolled the boulder aside
see | it was too dark to see a thing | saw every crack in the dark
swim | the place was under water | dived down three times
climb | it was up on a slippery wall | climbed the wall like a ladder
fly | it was on a ledge without stairs | flew up to the ledge
forge | there was a rusty lock on it | broke the lock with a chisel
""",
    ),
    lines=_slots("""
[One {time}|On {day1}] {h} found an old map {p.spot}. "[Go to|The treasure is at] {q}. Look
{q.spot}!"

{h} {h.moved} to {q} with {h.his} friend {g} the {g.kind}. There really was a chest {q.spot}, but
{block}.

"We need {f} the {f.kind}," {g.says} {g}. "{g.plural} are only good at {g.skill}, but {f.plural}
are good at {f.skill}." {h} fetched {f}, and {f} {clear}.

Inside were {n3} {counted} and {o.a}. {g} took {n1} {counted} and {f} took {n2}, so {o.the} went to
{h}, who [had always wanted to|could now] {o.use}.
"""),
)

WISH = Plot(
    rows=_table(
        "wish turned regret",
        """
be as big as a house | was as big as a house | could not get through the door
be as small as a pea | was as small as a pea | nearly drowned in a drop of dew
never sleep again | was wide awake | was bored from midnight to dawn
be king | wore a heavy crown | had to sign papers from morning to night
be as light as a feather | weighed nothing at all | was blown into the gutter
live under the sea | sat among the corals | got wet socks and sneezed
be as strong as a giant | had arms like oak trees | broke every cup that {h.he} touched
""",
    ),
    lines=_slots("""
One {weather} {time} {p.at}, {h} saved a {fairy} from {danger} and got one wish. "I want to
{wish}!" {h.says} {h}, and [puff|with a flash] {h.he} {turned}.

But after {n1} days {h} {regret} and was {sad}. "[Go back to|You must return to] {p} and look
{p.spot}," {f.says} {f} the {f.kind}. And {p.spot} sat the {fairy}.

"[Please|I beg you], I do not want to {wish} any more," {h.says} {h}. "I just want to be {h.a}."
And [puff|with a flash], {h} was {h.himself} again.
"""),
)

COUNT = Plot(
    lines=_slots("""
@setting

There {h.he} [gathered|found] {n3} {counted}.

Then {h.he} met {f} the {f.kind}. "[Would you give me|May I have] {n1}?" asked {f}. {h} gave
{f.him} {n1}. Now there were {n2} {counted}.

[A little later|After the next bend] came {g.a} called {g}. "[Just one|Please, one]," {g.says}
{g.the}. So {h} gave {g.him} one, and then there were {less}.

But [that evening|the next day] {f} and {g} came with {f.food} and {g.food}. "Who shares {n3}
{counted} has {n3} friends," {f.says} {f}. And {h} was {glad}.
"""),
)

LOST = Plot(
    lines=_slots("""
{h} [could not find|had lost] {h.his} {o}. {h.he.cap} {h.moved} to {p} and looked {p.spot}. There
{h.he} saw only {o2.a}.

Then {h.he} {h.moved} to {q}. There sat {g.a}. "Have you seen {o.a}?" "No," {g.says} {g.the}, "but
I have lost {o2.a}." "[{o2.a.cap}? I have just seen {o2.it}|I know where {o2.they} {o2.are}]!" said
{h}. "Look {p.at}, {p.spot}!"

At home {h.he} found {f}, {h.his} friend the {f.kind}. "You left {o.the} {r.at}, {r.spot},"
{f.says} {f}. "Here {o.they} {o.are}." {h} [hugged {f}|danced for joy]. "Come, let us {o.use}!"
"""),
)

NEIGHBOUR = Plot(
    lines=_slots("""
One {time} in {season} somebody new came to live {f.home}. "[Who is it|Who can it be]?" asked {g}
the {g.kind}. "Somebody who likes {f.food}," {h.says} {h}.

"Somebody {f.moved} about there [at night|in the dark]," {g.says} {g}. "[Surely it is a monster|It
is something wild]!"

But {h} took {o.a}, {h.moved} there and knocked {n1} times. "[Good {time}|Hello]," said {f.a}. "I
am {f}." "This is for you," {h.says} {h}, "so that you can {o.use}."

[Later|In the evening] {h} told {g}: "[It is no monster|You were wrong]. It is a {f.trait}
{f.kind}, and {f.he} {f.habit}."
"""),
)

PLOTS = (
    STUCK,
    MEND,
    TRADE,
    GIFT,
    SHARE,
    CONTEST,
    QUARREL,
    RIDDLE,
    JOURNEY,
    MESSAGE,
    RECIPE,
    SICK,
    GARDEN,
    TREASURE,
    WISH,
    COUNT,
    LOST,
    NEIGHBOUR,
)


# --------------------------------------------------------------------------------------------
# The cast
# --------------------------------------------------------------------------------------------


class Word(str):
    """A text of which templates can ask for a capitalised form."""

    __slots__ = ()

    @property
    def cap(self) -> str:
        """The text with a capital first letter."""
        return self[:1].upper() + self[1:]


@dataclass(frozen=True)
class Character:
    """A person or talking animal; the attributes are what templates can ask for."""

    name: str
    kind: str
    plural: str
    trait: str
    home: str
    food: str
    moved: str
    says: str
    ability: str
    female: bool

    def __str__(self) -> str:
        """The name."""
        return self.name

    @property
    def he(self) -> Word:
        """The pronoun of the subject."""
        return Word("she" if self.female else "he")

    @property
    def him(self) -> Word:
        """The pronoun of the object."""
        return Word("her" if self.female else "him")

    @property
    def his(self) -> Word:
        """The possessive pronoun."""
        return Word("her" if self.female else "his")

    @property
    def himself(self) -> Word:
        """The reflexive pronoun."""
        return Word("herself" if self.female else "himself")

    @property
    def a(self) -> Word:
        """For example ``a shy rabbit``."""
        return Word(f"a {self.trait} {self.kind}")

    @property
    def the(self) -> Word:
        """For example ``the rabbit``."""
        return Word(f"the {self.kind}")

    @property
    def skill(self) -> str:
        """What the kind is good at."""
        return SKILLS[self.ability]

    @property
    def habit(self) -> str:
        """What the trait makes the character do."""
        return TRAITS[self.trait].format(he=self.he, his=self.his)


@dataclass(frozen=True)
class Thing:
    """Something to own, lose and give away; the attributes are what templates can ask for."""

    noun: str
    look: str
    stuff: str
    purpose: str
    pair: bool

    def __str__(self) -> str:
        """For example ``red kite``."""
        return f"{self.look} {self.noun}"

    @property
    def a(self) -> Word:
        """For example ``a red kite`` or ``some warm mittens``."""
        return Word(f"{'some' if self.pair else 'a'} {self}")

    @property
    def any(self) -> Word:
        """The same without the look."""
        return Word(self.noun if self.pair else f"a {self.noun}")

    @property
    def the(self) -> Word:
        """For example ``the red kite``."""
        return Word(f"the {self}")

    @property
    def they(self) -> Word:
        """The pronoun of the subject."""
        return Word("they" if self.pair else "it")

    @property
    def it(self) -> Word:
        """The pronoun of the object."""
        return Word("them" if self.pair else "it")

    @property
    def are(self) -> str:
        """The verb in the present."""
        return "are" if self.pair else "is"

    @property
    def were(self) -> str:
        """The verb in the past."""
        return "were" if self.pair else "was"

    @property
    def use(self) -> str:
        """What the thing is for."""
        return self.purpose.format(it=self.it)


@dataclass(frozen=True)
class Place:
    """Somewhere to go; the attributes are what templates can ask for."""

    noun: str
    prep: str
    keeper: str
    sight: str
    spot: str

    def __str__(self) -> str:
        """For example ``the forest``."""
        return f"the {self.noun}"

    @property
    def at(self) -> Word:
        """For example ``in the forest``."""
        return Word(f"{self.prep} the {self.noun}")


Scene = dict[str, object]


def _parts(cell: str) -> list[str]:
    """Splits a cell that lists alternatives."""
    return [part.strip() for part in cell.split("/")]


def _usual(rng: random.Random, usual: Sequence[str], every: Sequence[str]) -> str:
    """Draws from the usual values most of the time and from every value otherwise."""
    return rng.choice(usual if rng.random() < HABIT_ODDS else every)


def _names(kind: Row) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the few names that are usual for a kind, and all the names it can have."""
    every = {"he": HIS_NAMES, "she": HER_NAMES}.get(kind["sex"], HIS_NAMES + HER_NAMES)
    start = 7 * [row["noun"] for row in KINDS].index(kind["noun"])
    return [every[(start + 13 * step) % len(every)] for step in range(4)], every


def _character(rng: random.Random, kind: Row, taken: Sequence[str]) -> Character:
    """Makes a character of a kind whose name is not taken."""
    usual, every = _names(kind)
    name = _usual(rng, usual, every)
    while name in taken:
        name = rng.choice(every)
    return Character(
        name=name,
        kind=kind["noun"],
        plural=kind["plural"],
        trait=_usual(rng, _parts(kind["traits"]), list(TRAITS)),
        home=rng.choice(_parts(kind["homes"])),
        food=rng.choice(_parts(kind["foods"])),
        moved=kind["moved"],
        says=kind["says"],
        ability=kind["skill"],
        female=name in HER_NAMES,
    )


def _cast(rng: random.Random, helper: str) -> tuple[dict[str, Character], Row]:
    """Draws the characters: the hero ``h``, the friend ``f``, and two others, ``g`` and ``k``.

    Args:
        rng: The source of chance.
        helper: The kind or skill which the friend must have and the others must lack; may be
            empty.

    Returns:
        The characters and the hero's row of the table of kinds.
    """
    able = [row for row in KINDS if helper in ("", row["noun"], row["skill"])]
    friend = rng.choice(able)
    others = [row for row in KINDS if row is not friend and (not helper or row not in able)]
    others = [row for row in others if row["skill"] != friend["skill"]]
    kinds = dict(zip("fhgk", [friend, *rng.sample(others, 3)], strict=True))
    cast: dict[str, Character] = {}
    for role, kind in kinds.items():
        cast[role] = _character(rng, kind, [who.name for who in cast.values()])
    return cast, kinds["h"]


def _things(rng: random.Random, stuff: str) -> dict[str, Thing]:
    """Draws three different things, the first one of a given stuff (or any, if empty)."""
    first = rng.choice([row for row in THINGS if stuff in ("", row["stuff"])])
    rest = rng.sample([row for row in THINGS if row is not first], 2)
    things = {}
    for role, row in zip(("o", "o2", "o3"), [first, *rest], strict=True):
        look = rng.choice(_parts(row["looks"]))
        noun = row["noun"].rstrip("+")
        things[role] = Thing(noun, look, row["stuff"], row["use"], row["noun"].endswith("+"))
    return things


def _place(rng: random.Random, row: Row) -> Place:
    """Makes a place from its row."""
    spot = rng.choice(_parts(row["spots"]))
    sight = rng.choice(_parts(row["sights"]))
    return Place(row["noun"], row["prep"], row["keeper"], sight, spot)


def _places(rng: random.Random, haunts: Sequence[str]) -> dict[str, Place]:
    """Draws the hero's home place and three different places, the first often a usual one."""
    nouns = [row["noun"] for row in PLACES]
    first = _usual(rng, haunts, nouns)
    others = rng.sample([noun for noun in nouns if noun != first], 2)
    chosen = [rng.choice(haunts), first, *others]
    rows = [PLACES[nouns.index(noun)] for noun in chosen]
    return {role: _place(rng, row) for role, row in zip(("home", *"pqr"), rows, strict=True)}


def _numbers(rng: random.Random) -> dict[str, Word]:
    """Draws numbers of which ``n1`` and ``n2`` add up to ``n3``, and ``less`` is ``n2 - 1``."""
    n1, n2 = rng.randint(2, 5), rng.randint(3, 7)
    values = {"n1": n1, "n2": n2, "n3": n1 + n2, "less": n2 - 1}
    return {name: Word(NUMBERS[value]) for name, value in values.items()}


def _extras(rng: random.Random) -> dict[str, str]:
    """Draws the single words of a story: weather, feelings, days and such."""
    day1, day2 = rng.sample(DAYS, 2)
    return {
        **rng.choice(WEATHER),
        **rng.choice(FAIRIES),
        "time": rng.choice(TIMES),
        "sad": rng.choice(SAD),
        "glad": rng.choice(GLAD),
        "counted": rng.choice(COUNTED),
        "day1": day1,
        "day2": day2,
    }


def _scene(rng: random.Random, plot: Plot) -> Scene:
    """Draws everything that the templates of a plot can ask for."""
    row = rng.choice(plot.rows) if plot.rows else {}
    cast, hero = _cast(rng, row.get("helper", ""))
    scene: Scene = {
        **cast,
        **_things(rng, row.get("stuff", "")),
        **_places(rng, _parts(hero["haunts"])),
        **_numbers(rng),
        **_extras(rng),
    }
    scene.update({name: Word(cell.format(**scene)) for name, cell in row.items()})
    return scene


# --------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou]|honest)")
_START = re.compile(r'(^"?|[.!?:] "|[.!?] |[.!?]" "|\." )([a-z])')


def _write(rng: random.Random, template: str, scene: Scene) -> str:
    """Chooses among the alternatives of a template and fills it in."""
    while (found := _CHOICE.search(template)) is not None:
        choice = rng.choice(found[1].split("|")).strip()
        template = template[: found.start()] + choice + template[found.end() :]
    text = " ".join(template.format(**scene).split())
    text = _ARTICLE.sub(r"\1n ", text)
    return _START.sub(lambda match: match[1] + match[2].upper(), text)


def _story(rng: random.Random, plots: Sequence[Plot]) -> str:
    """Writes one story of any length with one of some plots."""
    plot = rng.choice(plots)
    scene = _scene(rng, plot)
    lines = [rng.choice(SETTINGS) if line == "@setting" else line for line in plot.lines]
    lines = [rng.choice(OPENINGS), *lines, rng.choice(CLOSINGS)]
    return " ".join(filter(None, (_write(rng, line, scene) for line in lines)))


def stories(count: int, seed: int, plots: int = len(PLOTS)) -> Iterator[str]:
    """Writes stories of 60 to 150 words.

    Args:
        count: How many to write.
        seed: The same seed always gives the same stories.
        plots: How many of the plots to use, always the first ones.

    Yields:
        One story after the other, each a single line of text.
    """
    rng = random.Random(seed)
    written = 0
    while written < count:
        text = _story(rng, PLOTS[:plots])
        if MIN_WORDS <= len(text.split()) <= MAX_WORDS:
            written += 1
            yield text
