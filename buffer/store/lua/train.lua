-- leased -> trained, for all groups of a step; with uses left: -> ready. What is still leased for an earlier step was trained
-- too: its learner was answered before it went on, and Redis has lost that since. args: step (0-based), max_uses,
-- seed. Returns how many groups.
local groups = settle(args.step, args.max_uses, args.seed)
if groups > 0 then redis.call('HSET', key('meta'), 'next_step', args.step + 1) end
return groups
