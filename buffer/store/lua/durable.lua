-- trained -> durable, for the groups of steps that a saved checkpoint contains. args: steps (the checkpoint's number of
-- steps). Returns the number of groups.
local before = tonumber(redis.call('HGET', key('meta'), 'durable_steps') or 0)
redis.call('HSET', key('meta'), 'durable_steps', math.max(before, args.steps))
local found = redis.call('ZRANGEBYSCORE', key('trained'), '-inf', '(' .. args.steps, 'WITHSCORES')
local groups = {}
for i = 1, #found, 2 do
  groups[#groups + 1] = {
    id = found[i], before = 'trained', score = found[i + 1], detail = 'in the checkpoint of ' .. args.steps .. ' steps',
    facts = {'durable_at', timestamp()},
  }
end
enter_state_all('durable', groups)
count('durable', #groups)
return #groups
