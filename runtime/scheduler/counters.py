"""What a scheduler has counted since its start. Data, no decisions."""

from dataclasses import dataclass

from runtime.stats import EngineStats


@dataclass(kw_only=True, slots=True)
class SchedulerCounters:
    """Cumulative; named as in `EngineStats`."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0

    def write(self, stats: EngineStats) -> None:
        """Sets the fields of these names in a snapshot."""
        stats.num_prompt_tokens = self.num_prompt_tokens
        stats.num_generation_tokens = self.num_generation_tokens
        stats.num_preemptions = self.num_preemptions
        stats.prefix_cache_query_tokens = self.prefix_cache_query_tokens
        stats.prefix_cache_hit_tokens = self.prefix_cache_hit_tokens
        stats.encoder_cache_queries = self.encoder_cache_queries
        stats.encoder_cache_hits = self.encoder_cache_hits
