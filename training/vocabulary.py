"""Common words of up to eight letters: what pictures print and what bars are called."""

from __future__ import annotations

WORDS = tuple(
    """
able about above actor after again age agree air alarm album all alone also amber anchor angel angle animal
answer apple april apron arch area arm army arrow art ask august aunt autumn avenue baby back badge bag
baker ball banana band bank barn base basket bat bath beach bean bear beauty bed bee beer bell belt bench
berry best big bike bird black block blood blue board boat body bold bomb bone book boot border boss bottle
bottom bowl box boy brain branch brave bread break brick bridge bright broom brown brush bucket build bus
bush butter button cabin cable cake call camel camera camp can candle canvas cap car card care carpet carrot
castle cat caution cave center chain chair chalk chance cheese cherry chess chest child circle city class
clay clean clear clock closed cloth cloud clover club coach coal coast coat coffee coin cold color comet
cookie copper coral corn cotton cow crab crane crayon cream cross crowd crown cube cup curve cycle daily
dance danger dark data date dawn day deep deer delta desert desk dice dinner dish doctor dog doll dollar
door dove dragon dream dress drink drive drum duck dust eagle early earth east easy echo edge egg eight
elbow empty energy engine enter equal error evening event exit eye fabric face fact fall family fan farm
fast father feather february fence ferry field fig fire first fish five flag flame flat flight floor flour
flower flute fly fog food foot forest fork fort four fox frame free fresh friday friend frog fruit full fun
future galaxy game garden garlic gate ghost giant gift ginger girl glass globe glove go goal goat gold good
goose grape grass gravy gray great green grid ground group guard guitar hair half hall hammer hand happy
harbor hard harp hat hawk head heart heavy hello help hen hero hill home honey hook hope horse hotel hour
house ice idea inch index ink inn iron island ivory jacket jam january jar jazz jelly jet jewel job join
joke judge juice july jump june jungle kettle key kid king kite kitten knee knife koala label ladder lady
lake lamb lamp land large laser last laugh lawn leaf learn left lemon letter level light lily lime line lion
list little lock log london long lotus love lucky lunch machine magic magnet mail map maple march market
mask match may meadow medal melon menu metal middle milk mill mind mint mirror model monday money monkey
month moon moose mother motor mountain mouse mouth movie music nail name narrow nest net never new news
night nine noble noise north nose note novel number nurse nut oak oasis ocean october office oil old olive
one onion open orange orbit orchard otter oven over owl page paint palace palm panda panel paper paris park
party path peace peach pear pen pencil penguin people pepper phone photo piano picnic pig pillow pilot pine
pink pipe pizza place plain plane planet plant plate play plaza plum pocket poem point polar pond pony pool
port post potato power press price prince print prize pull pump pupil purple push puzzle queen quick quiet
quiz rabbit radar radio rain ranch red rest rice rich right ring river road robin robot rock rocket roof
room root rope rose round royal ruby ruler run sad safe sail salad sale salmon salt sand saturday scale
school score sea season seat second seed seven shadow shape shark sheep shelf shell ship shirt shoe shop
short show side sign signal silk silver simple six skate sky sleep slow small smart smile smoke snake snow
soap sock sofa soft solar song soup south space spice spider spoon sport spring square stamp star start
station steam steel stone stop store storm story stove straw street strong sugar suit summer sun sunday
sunny swan sweet swim table tail tall tango taxi tea team ten tent test text theater three thunder thursday
ticket tiger time tiny title toast today tomato tool top topaz torch tower town toy track train travel tree
truck tulip tuesday tunnel turtle two uncle under union unit up valley vanilla velvet video view village
violet violin visit voice volcano wagon walk wall walnut warm wash watch water wave west whale wheat wheel
white wide wild wind window wine wing winter wolf wonder wood wool word work world yard year yellow yes
young zebra zero zone zoo
""".split()  # noqa: SIM905 - a list of 700 strings reads worse
)

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

# Each family gives the bars of one chart their names.
BAR_NAMES: tuple[tuple[str, ...], ...] = (
    tuple("ABCDEFGH"),
    tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    tuple("PQRSTUVWXYZ"),
    _MONTHS,
    _DAYS,
    ("Q1", "Q2", "Q3", "Q4"),
    tuple(str(year) for year in range(2015, 2030)),
    ("Apple", "Pear", "Plum", "Grape", "Lemon", "Fig", "Kiwi", "Mango", "Peach", "Melon", "Cherry", "Banana"),
    (
        "Cat",
        "Dog",
        "Cow",
        "Pig",
        "Hen",
        "Fox",
        "Owl",
        "Bear",
        "Lion",
        "Bird",
        "Fish",
        "Horse",
        "Frog",
        "Duck",
    ),
    ("Tea", "Milk", "Water", "Juice", "Coffee", "Cola", "Beer", "Wine"),
    ("Red", "Blue", "Green", "Pink", "Gray", "Black", "White", "Brown", "Yellow", "Orange", "Purple"),
    ("Ann", "Bob", "Eve", "Tom", "Sam", "Max", "Mia", "Leo", "Ben", "Amy", "Zoe", "Kim", "Dan", "Joe"),
    ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Delhi", "Berlin", "London", "Madrid"),
    ("North", "South", "East", "West"),
    ("Bus", "Car", "Bike", "Train", "Walk", "Taxi", "Tram", "Boat", "Plane"),
    ("Math", "Art", "Music", "Sport", "History", "Bio"),
    ("One", "Two", "Three", "Four", "Five", "Six"),
)
