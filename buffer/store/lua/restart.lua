-- A learner (re)starts from a checkpoint, and is the run's present one from now on: leased -> ready, and what was trained
-- after that step -> ready, even if a later checkpoint had made it durable. What is still leased for a step that the
-- checkpoint contains was trained; Redis has lost that since.
-- args: steps (in the checkpoint, so those from there on are undone), max_uses, seed, learner.
-- Returns {groups that came back, durable groups of undone steps that the ledger has forgotten since}, or 'superseded'.
-- A hello that arrives again, late, must not take from its learner what it has leased and trained on since.
local done, learner = args.steps, args.learner
if redis.call('SADD', key('learners'), learner) == 0 then return check_learner(learner) or {0, 0} end
redis.call('HSET', key('meta'), 'next_step', done, 'learner', learner)
settle(done - 1, args.max_uses, args.seed)
local back = end_leases('the learner restarted')

-- Takes back the uses of undone steps.
local undone = 0
local function undo(id)
  local lengths, last = cjson.decode(about(id, 'lengths')), nil
  while true do
    last = redis.call('LINDEX', key('steps:' .. id), -1)
    if not last or tonumber(last) < done then break end
    redis.call('RPOP', key('steps:' .. id))
    redis.call('HINCRBY', key('about:' .. id), 'uses', -1)
    add_lengths('trained', lengths, -1)
    count('uses', -1)
    limiter(0, -1)
    undone = undone + 1
  end
  if last then redis.call('ZADD', key('used'), last, id) else redis.call('ZREM', key('used'), id) end
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('used'), done, '+inf')) do undo(id) end
for _, state in ipairs({'trained', 'durable'}) do
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key(state), done, '+inf')) do
    if state == 'durable' then count('durable', -1) end
    limiter(1, tonumber(about(id, 'uses')))
    undo(id)
    redis.call('HDEL', key('about:' .. id), 'exported')  -- the file says of other steps that they used it
    back_to_ready(id, 'undone: the learner restarted after ' .. done .. ' steps')
    back = back + 1
  end
end
redis.call('HDEL', key('meta'), 'finished')
-- The last steps are undone, so of their uses first those since the last publication: these groups are in the pipeline again.
write_counts()
redis.call('HSET', key('meta'), 'consumed', math.max(0, tonumber(redis.call('HGET', key('meta'), 'consumed') or 0) - undone))
local forgotten = tonumber(redis.call('HGET', key('meta'), 'forgotten_step') or -1)
-- The steps from here on are trained anew, on groups that are known.
redis.call('HSET', key('meta'), 'forgotten_step', math.min(forgotten, done - 1))
return {back, math.max(0, forgotten + 1 - done)}
