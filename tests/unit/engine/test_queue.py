"""Who waits, who is next, who is refused."""

from __future__ import annotations

from array import array

from paddock_runner.engine.policy import Policy
from paddock_runner.engine.queue import WaitQueue
from paddock_runner.engine.request import Request
from paddock_runner.wire.messages import Ask, AskView

MS = 1_000_000
NEVER = Policy(oldest_every=1_000_000, head_start_tokens=0)


def request(n_tokens: int = 10, client: int = 0, at_ms: int = 0, priority: int = 0, deadline_ns: int = 0, goes_on: bool = False) -> Request:
    view = AskView(memoryview(Ask(1, array("i", range(n_tokens)), client=client, priority=priority, deadline_ns=deadline_ns, goes_on=goes_on).encode()))
    return Request(view, 0, at_ms * MS, 1000, view.sampling)


def push(queue: WaitQueue, r: Request, cached: int = 0) -> Request | None:
    queue.open(r.client)
    return queue.push(r, cached)


def drain(queue: WaitQueue, serve: int = 0) -> list[Request]:
    order = []
    while (r := queue.head()) is not None:
        queue.take(r, 0)
        queue.charge(r.client, serve or r.n_tokens)
        order.append(r)
    return order


def test_the_shortest_goes_first_and_what_is_cached_does_not_count() -> None:
    queue = WaitQueue(NEVER)
    long, short, cached = request(500), request(100), request(600)
    for r, n in ((long, 0), (short, 0), (cached, 560)):
        push(queue, r, n)
    assert drain(queue) == [cached, short, long]


def test_waiting_makes_up_for_length() -> None:
    queue = WaitQueue(NEVER)
    long = request(1000, at_ms=0)
    push(queue, long)
    soon, late = request(100, at_ms=100), request(100, at_ms=200)
    push(queue, soon), push(queue, late)
    assert drain(queue) == [soon, long, late]


def test_clients_take_turns_by_tokens_served() -> None:
    queue = WaitQueue(NEVER)
    many = [request(100, client=1) for _ in range(6)]
    one = [request(100, client=2), request(100, client=2)]
    for r in many + one:
        push(queue, r)
    assert [r.client for r in drain(queue)][:4] in ([1, 2, 1, 2], [2, 1, 2, 1])


def test_a_client_that_comes_late_is_next_but_has_saved_nothing_up() -> None:
    queue = WaitQueue(NEVER)
    for _ in range(20):
        push(queue, request(100, client=1))
    for _ in range(5):
        r = queue.head()
        assert r is not None
        queue.take(r, 0)
        queue.charge(1, 100)
    for _ in range(10):
        push(queue, request(100, client=2))
    order = [r.client for r in drain(queue)]
    assert abs(order[:10].count(1) - 5) <= 1


def test_who_comes_back_alone_starts_where_the_last_one_stood() -> None:
    queue = WaitQueue(NEVER)
    queue.open(1)
    queue.charge(1, 5000)
    queue.close(1)
    queue.open(2)
    queue.open(1)
    assert queue.clients[2].served_tokens == queue.clients[1].served_tokens == 5000


def test_priority_goes_first_but_its_head_start_is_bounded() -> None:
    queue = WaitQueue(Policy(oldest_every=1_000_000, priority_tokens=250))
    normal = request(10, client=1)
    urgent = [request(100, client=2, priority=1) for _ in range(6)]
    push(queue, normal)
    for r in urgent:
        push(queue, r)
    order = drain(queue)
    assert order[0] in urgent and order.index(normal) == 3


def test_every_so_often_the_oldest_goes_whatever_its_client_has_had() -> None:
    queue = WaitQueue(Policy(oldest_every=4))
    oldest = request(10, client=1)
    queue.open(1)
    queue.charge(1, 10_000)
    push(queue, oldest)
    for i in range(20):
        r = request(10, client=2 + i, at_ms=1)
        queue.open(r.client)
        queue.clients[r.client].served_tokens = 0
        queue.push(r, 0)
    assert drain(queue).index(oldest) == 3


def test_the_oldests_turn_comes_after_that_of_a_light_client() -> None:
    queue = WaitQueue(Policy(oldest_every=4, head_start_tokens=0))
    longest, *others = [request(900 if not i else 10, client=1, at_ms=0) for i in range(12)]
    for r in (longest, *others):
        push(queue, r)
    for _ in range(3):
        first = queue.head()
        assert first is not None and first is not longest
        queue.take(first, 0)
    assert queue.head() is longest, "it is its turn"
    queue.charge(1, 1000)
    guest = request(20, client=2, at_ms=1)
    push(queue, guest)
    queue.clients[2].served_tokens = 0
    assert queue.head() is guest
    queue.take(guest, 0)
    assert queue.head() is longest, "put off, not lost"


def test_the_oldest_has_its_turn_though_there_is_always_another_light_client() -> None:
    queue = WaitQueue(Policy(oldest_every=4))
    many = [request(10, client=1, at_ms=0) for _ in range(40)]
    for r in many:
        push(queue, r)
    queue.charge(1, 50_000)
    taken = []
    for k in range(40):
        push(queue, request(10, client=2 + k, at_ms=1 + k))
        queue.clients[2 + k].served_tokens = 0
        head = queue.head()
        assert head is not None
        queue.take(head, 0)
        queue.close(head.client)
        taken.append(head.client)
    assert taken.count(1) == 40 // 8, "every eighth, where it would be every fourth among equals"


def test_a_full_queue_refuses_the_newcomer_of_the_heaviest_client() -> None:
    queue = WaitQueue(Policy(max_queue=3))
    for _ in range(3):
        assert push(queue, request(client=1)) is None
    extra = request(client=1)
    assert push(queue, extra) is extra
    assert queue.n == 3 and not extra.is_queued


def test_a_full_queue_takes_the_rest_of_an_answer() -> None:
    queue = WaitQueue(Policy(max_queue=3))
    for _ in range(3):
        push(queue, request(client=1))
    rest = request(client=1, priority=1000, goes_on=True)
    assert push(queue, rest) is None and queue.head() is rest and queue.n == 4
    assert queue.highest == 0, "nobody has to make way for it"


def test_a_full_queue_makes_the_heaviest_client_give_a_place_to_another() -> None:
    queue = WaitQueue(Policy(max_queue=3))
    hog = [request(10 * (i + 1), client=1) for i in range(3)]
    for r in hog:
        push(queue, r)
    guest = request(client=2)
    assert push(queue, guest) is hog[2]
    assert queue.n == 3 and guest.is_queued and not hog[2].is_queued
    second = request(client=2)
    assert push(queue, second) is second


def test_deadlines_of_the_waiting_pass_and_of_the_started_do_not() -> None:
    queue = WaitQueue(NEVER)
    a, b, c = (request(deadline_ns=d) for d in (50, 20, 0))
    for r in (a, b, c):
        push(queue, r)
    assert queue.next_deadline_ns == 20
    assert queue.overdue(10) is None
    queue.drop(b)
    assert queue.overdue(30) is None and queue.overdue(60) is a
    queue.drop(a)
    assert queue.overdue(1000) is None and queue.next_deadline_ns is None


def test_one_that_is_put_back_keeps_its_place_and_its_deadline() -> None:
    queue = WaitQueue(NEVER)
    a, b = request(10, deadline_ns=99), request(20)
    push(queue, a), push(queue, b)
    queue.drop(a)
    queue.put_back(a, 0)
    assert queue.head() is a and queue.waiting() == [a, b] and queue.overdue(100) is a
    queue.drop(a), queue.drop(a)
    assert queue.n == 1 and queue.head() is b
    queue.drop(b)
    queue.put_back(b, 0)
    assert queue.waiting() == [b]


def test_who_is_put_back_stands_behind_who_came_before_and_counts_what_was_computed_meanwhile() -> None:
    queue = WaitQueue(Policy(oldest_every=1, head_start_tokens=0))
    first, second, third = (request(100, client=k, at_ms=k) for k in range(3))
    for r in (first, second, third):
        push(queue, r)
    for r in (third, second):
        queue.drop(r)
    queue._arrivals = [entry for entry in queue._arrivals if entry[3] is first]  # as if made anew meanwhile
    for r in (third, second):
        queue.put_back(r, 96)
    assert queue.waiting() == [first, second, third] and queue.head() is first, "the oldest is who came first"
    assert queue.uncached_tokens == 100 + 4 + 4 and third.uncached_tokens == 4
    for r in (first, second, third):
        queue.drop(r)
    assert queue.uncached_tokens == 0


def test_who_waits_twice_counts_once_and_by_what_is_known_last() -> None:
    queue = WaitQueue(NEVER)
    first, second = request(100), request(90)
    push(queue, first), push(queue, second)
    for _ in range(3):
        queue.drop(first)
        queue.put_back(first, 60)
    assert queue.waiting() == [first, second] and queue.n == 2 and queue.head() is first, "forty tokens are left"
    queue.drop(first)
    queue.put_back(first, 0)
    assert queue.head() is second and drain(queue) == [second, first]


def test_retry_after_grows_with_the_queue() -> None:
    queue = WaitQueue(NEVER)
    for i in range(50):
        push(queue, request())
        if i % 2:
            r = queue.head()
            assert r is not None
            queue.take(r, i * 100 * MS)
    few = WaitQueue(NEVER).retry_after_ms()
    assert few == 100 and queue.retry_after_ms() > 1000


def test_one_wait_between_two_admissions_tells_the_next_client_when_to_come_back() -> None:
    queue = WaitQueue(NEVER)
    for _ in range(5):
        push(queue, request())
    for i in range(2):
        head = queue.head()
        assert head is not None
        queue.take(head, (1 + i) * 500 * MS)
    assert queue.retry_after_ms() == 4 * 500


def test_idle_clients_are_forgotten_when_there_are_many() -> None:
    queue = WaitQueue(NEVER)
    for client in range(5000):
        queue.open(client)
        queue.close(client)
    assert len(queue.clients) <= 1025


def test_who_has_left_is_forgotten_while_others_are_always_at_work_the_least_served_first() -> None:
    queue = WaitQueue(NEVER)
    queue.open(-1)
    for client in range(5000):
        queue.open(client)
        queue.charge(client, 100_000 if client == 7 else 10)
        queue.close(client)
    assert len(queue.clients) <= 1025 and list(queue.busy) == [-1]
    queue.open(7)
    assert queue.clients[7].served_tokens == 100_000, "who has had much is remembered"


def test_no_prompt_is_kept_of_who_no_longer_waits() -> None:
    queue = WaitQueue(NEVER)
    for k in range(300):
        push(queue, request(10, client=k % 3, at_ms=k, deadline_ns=10**18))
        if k % 3:
            queue.drop(queue.waiting()[-1])
    assert queue.n == 100
    assert [len(queue.clients[k].heap) for k in range(3)] == [100, 0, 0] and len(queue._deadlines) <= 64 + 4 * 100
    last = queue.waiting()[-1]
    for r in queue.waiting()[:-1]:
        queue.drop(r)
    assert len(queue.clients[0].heap) <= 68 and len(queue._deadlines) <= 68
    queue.drop(last)
    assert not queue.clients[0].heap and not queue._deadlines
