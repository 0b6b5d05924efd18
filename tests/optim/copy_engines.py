"""Copy engines between CPU tensors that use all the freedom a real one has, so that a missing wait shows."""

import torch
from numerics import same_bits


class Scrambled:
    """Each direction is a queue. When its copies are made is drawn from `seed`, or "early": at once, or "late": when
    somebody waits for them. A copy reads its source when it is made. Until the host has waited for a copy, whoever
    changes what the copy reads or has written is found out at the next call (`check`).
    """

    def __init__(self, when="late", seed=0):
        self.when, self.generator = when, torch.Generator().manual_seed(seed)
        self.queues = {"down": [], "up": []}  # (number, target, source) that are still to be made
        self.in_flight = []  # (number, direction, "source" or "target", tensor, its value): what nobody may change
        self.count = 0
        self.calls = []
        self.begun = False

    def empty_like(self, t):
        return torch.full_like(t, 77.0)

    def empty_bytes(self, count):
        return torch.full((count,), 0xAB, dtype=torch.uint8)

    def _make(self, direction, upto):
        queue = self.queues[direction]
        while queue and queue[0][0] <= upto:
            number, target, source = queue.pop(0)
            with torch.no_grad():
                target.copy_(source)
            self.in_flight.append((number, direction, "target", target, target.clone()))

    def check(self):
        for number, direction, role, tensor, value in self.in_flight:
            assert same_bits(tensor, value), (
                f"copy {number} {direction}: its {role} was changed before the host waited"
            )

    def _some_time_passes(self):
        self.check()
        for direction, queue in self.queues.items():
            if queue and self.when == "random":
                first, last = queue[0][0], queue[-1][0]
                upto = torch.randint(first - 1, last + 1, (), generator=self.generator).item()
                self._make(direction, upto)
            elif self.when == "early":
                self._make(direction, self.count)

    def begin(self):
        self.calls.append("begin")
        self._some_time_passes()
        self.begun = True

    def _start(self, direction, targets, sources):
        assert self.begun, "begin() was not called: the gradients may not be there yet"
        self._some_time_passes()
        for target, source in zip(targets, sources, strict=True):
            assert target.shape == source.shape and target.dtype == source.dtype
            self.count += 1
            self.queues[direction].append((self.count, target, source))
            self.in_flight.append((self.count, direction, "source", source, source.clone()))
        self.calls.append(direction)
        self._some_time_passes()
        return direction, self.count

    def copy_down(self, host, device):
        return self._start("down", host, device)

    def copy_up(self, device, host):
        return self._start("up", device, host)

    def synchronize(self, ticket):
        direction, upto = ticket
        self._some_time_passes()
        self._make(direction, upto)
        self.check()
        self.in_flight = [x for x in self.in_flight if x[1] != direction or x[0] > upto]
        self.calls.append(f"wait {direction}")

    def finish(self):
        """The device reads its parameters next, so they are made; the host has not waited for them."""
        self._some_time_passes()
        self._make("up", self.count)
        # Device tensors are the user's again; the host memory that was read from is not yet.
        self.in_flight = [x for x in self.in_flight if (x[1], x[2]) != ("up", "target")]
        self.begun = False
        self.calls.append("finish")
