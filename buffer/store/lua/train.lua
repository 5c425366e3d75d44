-- leased -> trained, for all groups of a step; with uses left: -> ready. Groups still leased for an earlier step were
-- trained too: the learner was answered before it went on, and Redis has lost that record. args: step (0-based),
-- max_uses, seed, spill_bytes.
-- Returns the number of groups.
local groups = finish_steps(args.step, args.max_uses, args.seed)
redis.call('HDEL', key('meta'), 'resumed_depth')  -- a version published from now on contains further steps
if groups > 0 then redis.call('HSET', key('meta'), 'next_step', args.step + 1) end
return groups
