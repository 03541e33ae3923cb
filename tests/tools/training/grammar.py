"""The children's stories that the shipped model is trained on, drawn from a context-free grammar."""

import random
import re
from collections.abc import Iterator, Mapping

# Each symbol at the margin has equally likely expansions, with a bar between them.
# A symbol in capitals in the text ({He}) expands as its lower-case form, with a capital letter.
GRAMMAR_TEXT = """
document: {story} | {story} | {turn} | {turn} User: {again} Story: {again_story}
turn: User: {ask} a {look} {animal}. Story: {story}
  | User: {ask} {name} and {friend}. Story: {story}
  | User: {ask} a storm. Story: {opening} {trait} {storm} {ending}
  | User: {ask} a race. Story: {opening} {trait} {race} {ending}
  | User: {ask} a garden. Story: {opening} {trait} {garden} {ending}
ask: Tell me a story about | Please tell me about | I want to hear about
again: What happened the next day? | Tell me more. | And then?
again_story: The next day, {lost} {ending} | The next day, {cake} {ending} | The next day, {river} {ending}
story: {opening} {trait} {when}, {lost} {ending}
  | {opening} {trait} {when}, {found} {ending}
  | {opening} {trait} {storm} {ending}
  | {opening} {trait} {when}, {cake} {ending}
  | {opening} {trait} {when}, {river} {ending}
  | {opening} {trait} {night} {ending}
  | {opening} {trait} {garden} {ending}
  | {opening} {trait} {race} {ending}
opening: Once upon a time, there was a {look} {animal} named {name}. {He} lived {home}.
  | Once upon a time, a {look} {animal} named {name} lived {home}.
  | Once upon a time, {home}, there lived a {look} {animal} named {name}.
  | There was once a {look} {animal} who lived {home}. {His} name was {name}.
  | A {look} {animal} named {name} lived {home}.
  | The {look} {animal} lived {home}. {His} name was {name}.
  | {Name} was a {look} {animal} who lived {home}.
  | Long ago, {name} and {friend} lived {home}. {Name} was a {look} {animal}.
trait: {He} had a {colour} {thing}, and {he} took it everywhere. {bond}
  | {He} loved to {hobby} and to look at the {sight}. {bond}
  | Every {part}, {he} liked to {hobby} {place}. {bond}
  | Everyone said that {name} was very {virtue}. {bond}
bond: {His} best friend was a {friend_animal} named {friend}.
  | {He} often played with {friend} the {friend_animal}.
  | {Friend} the {friend_animal} lived next door.
lost: {name} could not find {his} {colour} {thing}. {search} {sad} {offer} {seek} {found_it}
search: {He} looked under the bed and behind the door, but it was not there.
  | {He} looked in every box, but all of them were empty.
  | {He} ran up and down the hill, but {he} did not see it.
sad: {Name} sat down and began to cry. | {Name} felt very sad. | "Oh no," said {name}, "what can I do?"
offer: "Do not cry," said {friend}. "I will help you."
  | {Friend} heard {him} and came to help.
  | "Let us look for it together," said {friend}.
seek: They looked {place} and they asked {helper}.
  | They went to look {place}, and there they met {helper}.
found_it: At last, they found the {thing} {hidden}. {joy}
  | "I saw a {colour} {thing} {hidden}," said {helper}. They ran to get it. {joy}
  | Then {friend} saw something {colour} {hidden}. It was the {thing}! {joy}
joy: {Name} jumped for joy.
  | {Name} gave {friend} a big hug.
  | "Thank you, thank you!" said {name}.
  | They both began to laugh.
found: {name} was walking {place} when {he} saw a {colour} {thing} {hidden}. {wonder} {ask_friend} {owner} {joy}
wonder: "Who does this belong to?" {he} asked.
  | It was so pretty that {he} wanted to keep it.
  | "Someone must be very sad without it," {he} said.
ask_friend: {Name} asked {friend}, but {friend} did not know. So they went to see {helper}.
  | {Name} ran to {friend}. "Let us ask {helper}," said {friend}.
owner: "That is my {thing}!" said {helper}. "I looked for it all day."
  | It was the {thing} that {helper} had lost. {Name} gave it back.
  | "You are so {virtue}," said {helper}. "You may keep the {thing}."
storm: {When}, dark clouds came over the hill. {rain} {knock} {shelter} {rainbow}
rain: The wind blew and the rain fell all day.
  | There was a loud boom, and then it began to rain.
  | Soon the snow was as high as the door.
knock: Then {name} heard a knock at the door. It was {friend}, cold and wet.
  | "Where is {friend}?" said {name}. {He} put on {his} {colour} coat and went out to look.
  | {Friend} had no place to go, so {he2} ran to the house of {name}.
shelter: "Come in and sit by the fire," said {name}. They ate warm {food} and told stories.
  | {Name} gave {friend} a warm bed and some {food}.
  | They sat close together and sang a song until they were not afraid.
rainbow: When the storm was over, the sun came out and the fields looked new.
  | In the morning, they saw a rainbow over the sea.
  | At last the sky was blue again.
cake: {name} wanted to make a cake with {fruit} for {friend}. {empty} {He} went to see {helper}. {trade} {party}
empty: But there were no {fruit} in the house. | But the basket of {fruit} was empty.
trade: "You can have some of mine," said {helper}, "if you sing me a song." So {name} sang a happy song.
  | {Helper} gave {him} a basket of {fruit}, and {name} said thank you.
  | "I will help you pick some," said {helper}. Soon the basket was full.
party: The cake was big and sweet. {Friend} ate three pieces and began to dance.
  | {Friend} was so happy to see the cake. "This is the best day of my life!" {he2} said.
  | {Name} made the cake, but it fell on the floor! {Friend} did not mind, and they ate it all the same.
river: {name} and {friend} wanted to cross the river to pick some {fruit}. {deep} {idea} {work} {joy}
deep: But the water was too deep, and they could not swim.
  | But the old bridge was gone.
  | But the water was fast and cold, and {friend} was afraid.
idea: "I have an idea," said {name}. "We can make a boat from a {colour} box."
  | {Friend} saw a long log. "We can walk on this," {he2} said.
  | They asked {helper} how to get to the other side. "Try, and try again," said {helper}.
work: They worked all day, and at last they got across.
  | It was hard, but they did not stop. Soon they were on the other side.
  | First they fell in, but then it worked!
night: One night, {name} could not sleep. {noise} {scare} {brave} It was only {friend}, who {excuse}. {joy}
noise: There was a strange sound {hidden}. | {He} heard something go tap, tap, tap. | A big shadow moved on the wall.
scare: "Is it a monster?" said {name}. | {Name} hid under the bed. | {He} held {his} {thing} very close.
brave: But {he} tried to be brave, so {he} got up and opened the door.
  | {He} took a small lamp and went to look.
  | "I am not afraid," {he} said, and {he} looked out.
excuse: wanted to look at the moon | had come to bring some {food} | could not sleep too | had lost a {colour} {thing}
garden: {When}, {helper} gave {name} a small seed. {plant} {wait} {grow} {joy}
plant: {He} put it in the ground and gave it some water.
  | {Name} and {friend} put it in the garden, next to the wall.
  | "What will it be?" said {friend}. "Let us plant it and see," said {name}.
wait: They waited and waited, but nothing came up.
  | Every day, {he} sang to it, and the sun was warm.
  | "It is too slow," said {friend}. "Wait a little more," said {name}.
grow: Then a {colour} flower came up, as tall as a house.
  | At last, it was a tree full of {fruit}.
  | One morning, there was a {colour} flower, and it smelled so sweet.
race: {When}, there was a big race {place}. {Name} and {friend} both wanted to win. {run} {fall} {win}
run: "One, two, three, go!" said {helper}, and they ran.
  | {Friend} ran as fast as the wind, but {name} was slow.
  | {Name} ran so fast that {his} feet did not touch the ground.
fall: Then {friend} fell and hurt {his2} leg. {Name} stopped to help.
  | But {name} lost the way and had to ask for help.
  | Near the end, {friend} began to get tired. "Come on, you can do it!" said {name}.
win: They came in last, but {helper} gave them both a {colour} {thing}.
  | They crossed the line together, and everyone was happy.
  | {Name} did not win, but {he} had a new {thing} and a good friend.
ending: {lesson} {close} | {close} | From that day on, {name} and {friend} were best friends. {close}
lesson: {Name} learned that it is good to {deed}.
  | "It is good to {deed}," said {helper}.
  | And from then on, {name} always tried to {deed}.
close: The end.
  | Then they went home to eat {food}. The end.
  | That night, {name} slept very well. The end.
  | And they all lived happily ever after.
deed: help a friend | tell the truth | share with others | try again
when: One day | One morning | One sunny day | One cold winter day
place: by the sea | in the forest | on the hill | in the park
hidden: under a big stone | behind a tree | in the tall grass | near the old well
home: in a tall tree
  | in a small house by the river
  | under an old bridge
  | on a farm
  | at the edge of the forest
  | in a red house on the hill
helper: the old owl | the wise turtle | the kind farmer | the white duck
look: little | brave | funny | small brown | big gray | clever
thing: ball | hat | kite | bell | book | drum
colour: red | blue | green | yellow
food: honey | soup | bread | corn
fruit: apples | berries | pears | plums
sight: stars | moon | sea | fields
hobby: sing | dance | read | play | run
part: day | night | morning
virtue: kind | brave | clever
"""

ANIMALS = ("cat", "dog", "rabbit", "bear", "fox", "mouse", "frog", "pig")
GIRLS = ("Lily", "Mia", "Anna", "Rosie")
BOYS = ("Tom", "Max", "Ben", "Leo")
ONCE_PER_STORY = frozenset({"home", "look", "thing", "colour", "food", "fruit", "helper", "sight", "virtue"})


def parse_grammar(text: str) -> dict[str, tuple[str, ...]]:
    """Maps each symbol at the margin to its expansions."""
    joined = re.sub(r"\n\s+\|", " |", text.strip())
    pairs = (line.split(": ", 1) for line in joined.splitlines())
    return {symbol: tuple(expansions.split(" | ")) for symbol, expansions in pairs}


def draw_cast(rng: random.Random) -> dict[str, str]:
    """Draws who the story is about: two different animals with names and pronouns."""
    animal, friend_animal = rng.sample(ANIMALS, 2)
    name, friend = rng.sample(GIRLS + BOYS, 2)
    he, his, him = ("she", "her", "her") if name in GIRLS else ("he", "his", "him")
    he2, his2 = ("she", "her") if friend in GIRLS else ("he", "his")
    return {
        "name": name, "animal": animal, "he": he, "his": his, "him": him,
        "friend": friend, "friend_animal": friend_animal, "he2": he2, "his2": his2,
    }  # fmt: skip


def expand(symbol: str, rules: Mapping[str, tuple[str, ...]], bound: dict[str, str], rng: random.Random) -> str:
    """Expands a symbol; `bound` holds what the story has already settled and is added to."""
    if symbol in bound:
        return bound[symbol]
    if symbol[0].isupper():
        text = expand(symbol.lower(), rules, bound, rng)
        return text[0].upper() + text[1:]
    chosen = rng.choice(rules[symbol])
    text = re.sub(r"{(\w+)}", lambda found: expand(found[1], rules, bound, rng), chosen)
    if symbol in ONCE_PER_STORY:
        bound[symbol] = text
    return text


def write_story(rules: Mapping[str, tuple[str, ...]], rng: random.Random) -> str:
    """Writes one document: a story, or a conversation in the form of the model's chat template."""
    text = expand("document", rules, draw_cast(rng), rng)
    return re.sub(r" (User|Story):", r"\n\1:", text)


def write_stories(seed: int) -> Iterator[str]:
    """Writes documents without end; the same seed writes the same ones."""
    rng, rules = random.Random(seed), parse_grammar(GRAMMAR_TEXT)
    while True:
        yield write_story(rules, rng)
