"""What a computed step means for its sequences: tokens out, blocks published, choices forked and ended."""

from __future__ import annotations

from anabranch.engine.actions import Commit
from anabranch.engine.book import Book
from anabranch.engine.handoff import Handoffs
from anabranch.engine.kv_port import Filled
from anabranch.engine.messages import Prefilled, TokenEvent
from anabranch.engine.request import FinishReason, TokenLogprob, Usage
from anabranch.engine.runner import Sampled
from anabranch.engine.sequence import Job, Sequence, State, finish_reason


class Streams:
    def __init__(self, book: Book, handoffs: Handoffs) -> None:
        self._book = book
        self._handoffs = handoffs

    def advance(self, sequence: Sequence, count: int, answer: Sampled | None) -> None:
        """`count` more tokens of the sequence have K/V; `answer` continues it."""
        sequence.computed += count
        if sequence.computed // self._book.block_tokens > sequence.published:
            self.commit(sequence)
        job = sequence.job
        if answer is None:
            self._handoffs.push_computed(sequence)
            if sequence.computed >= job.prompt and job.first is not None and not job.forked:
                self.fork_given(sequence)
        elif job.kind == "prefill":
            self._handoffs.push_computed(sequence)
            self._end_prefill(sequence, answer)
        else:
            streams = [sequence] if job.forked else self._fork(sequence)
            for stream, token, logprob in zip(streams, answer.tokens, _logprobs(answer), strict=True):
                self._append(stream, token, logprob)

    def fork_given(self, sequence: Sequence) -> None:
        """The prompt is in place and its first tokens were chosen elsewhere, and are known to the client."""
        job = sequence.job
        for stream, token in zip(self._fork(sequence), job.first or (), strict=True):
            stream.tokens.append(token)
            if self._reason(stream, token) is not None:
                self._end(stream)

    def commit(self, sequence: Sequence) -> None:
        """Publish every block that became full, parents first."""
        book = self._book
        end = sequence.computed // book.block_tokens
        if not sequence.job.request.cacheable or end <= sequence.published:
            return
        keys = sequence.keys(book.block_tokens)
        filled: list[Filled] = []
        for index in range(sequence.published, end):
            parent = keys[index - 1] if index else b""
            filled.append(Filled(sequence.pages[index], keys[index], parent))
        sequence.published = end
        sequence.table.seal(end)
        if filled:
            book.do(Commit(filled, sequence.job.request.tenant))

    def _fork(self, lead: Sequence) -> list[Sequence]:
        """One sequence per choice, all on the lead's pages; the partial last page is copied when one writes to it."""
        book, job = self._book, lead.job
        job.forked = True
        streams = [lead]
        lead.shared_tail = job.request.n > 1 and lead.computed % book.block_tokens != 0
        for index in range(1, job.request.n):
            twin = Sequence(book.number(), job, index, lead.tokens, lead.table.fork())
            twin.computed = lead.computed
            twin.chain = lead.chain.fork() if lead.chain is not None else None
            twin.published = lead.published
            twin.shared_tail = lead.shared_tail
            twin.state = State.RUNNING
            book.running[twin.number] = twin
            job.sequences.append(twin)
            streams.append(twin)
        return streams

    def _append(self, stream: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        stream.tokens.append(token)
        reason = self._reason(stream, token)
        usage = stream.job.usage if reason is not None else None
        self._book.emit(
            TokenEvent(
                request_id=stream.job.request.request_id,
                index=stream.index,
                token=token,
                logprob=logprob,
                finish=reason,
                usage=usage,
            )
        )
        if reason is not None:
            self._end(stream)

    def _reason(self, stream: Sequence, token: int) -> FinishReason | None:
        params = stream.job.request.sampling
        return finish_reason(params, token, stream.generated, len(stream.tokens), self._book.limit)

    def _end(self, stream: Sequence) -> None:
        job = stream.job
        self._book.log(job, f"choice {stream.index} ended with {stream.generated} tokens")
        job.unfinished -= 1
        self._book.retire(stream)

    def _end_prefill(self, sequence: Sequence, answer: Sampled) -> None:
        job = sequence.job
        usage = job.usage or Usage(prompt=job.prompt, computed=job.prompt)
        first = [
            self._first(job, index, token, logprob)
            for index, (token, logprob) in enumerate(zip(answer.tokens, _logprobs(answer), strict=True))
        ]
        self._book.log(job, "prompt computed")
        self._book.send(Prefilled(request_id=job.id, first=first, usage=usage))
        self._handoffs.finish_outbound(sequence)

    def _first(self, job: Job, index: int, token: int, logprob: TokenLogprob | None) -> TokenEvent:
        reason = finish_reason(job.sampling, token, 1, job.prompt + 1, self._book.info.context_tokens)
        usage = job.usage if reason is not None else None
        return TokenEvent(request_id=job.id, index=index, token=token, logprob=logprob, finish=reason, usage=usage)


def _logprobs(answer: Sampled) -> list[TokenLogprob | None]:
    return list(answer.logprobs) if answer.logprobs is not None else [None] * len(answer.tokens)
